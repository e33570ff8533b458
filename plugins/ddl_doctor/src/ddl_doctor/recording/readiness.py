"""Store the time at which each tensor was submitted, until the tensor's bucket has run. Used by the timeline.

The cost is low even if many tensors are submitted in one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ddlcore.messages.to_rank import Bucket, Planned

Key = tuple[int, str]  # process set id, name
MOST = 4  # at most so many submission times are stored for one tensor
MOST_CALLS = 8  # at most so many calls that have started several tensors are stored as calls


class _Call:
    """A set of tensors that one call starts together, usually in every step.

    The object is created at the first such call, and later calls with the same tensors use it again.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = tuple(entries)  # kept alive, because their ids are the key of this call
        self.keys = frozenset((entry.set_id, entry.name) for entry in entries)
        self.covers: dict[int, tuple[Planned, bool]] = {}  # by id of a planned bucket: are all its tensors in this call

    def covers_all(self, planned: Planned) -> bool:
        known = self.covers.get(id(planned))
        if known is None or known[0] is not planned:
            whole = all((planned.set_id, name) in self.keys for name in planned.names)
            known = self.covers[id(planned)] = (planned, whole)
        return known[1]


class Readiness:
    """The submission times of one rank's tensors. Only the thread that writes the timeline uses this object."""

    def __init__(self) -> None:
        self._ready: dict[Key, list[int]] = {}
        self._anonymous: dict[tuple[int, bytes], deque[str]] = {}  # generated names of calls without a name, in order
        self._calls: dict[tuple[int, ...], _Call] = {}
        self._together: list[tuple[int, _Call, list[Planned]]] = []  # time, call, its buckets that have run

    def one(self, set_id: int, name: str, spec: bytes, at_ns: int) -> None:
        """Record that the tensor ``name`` was submitted at ``at_ns``.

        ``spec`` is the encoded type and shape of the tensor.
        """
        self._note((set_id, name), at_ns)
        if name.startswith("noname."):
            waiting = self._anonymous.setdefault((set_id, spec), deque())
            while waiting and (set_id, waiting[0]) not in self._ready:
                waiting.popleft()  # this call was negotiated, and has run under its generated name
            waiting.append(name)

    def together(self, entries: Sequence[Any], at_ns: int) -> None:
        """Record that the persistent requests ``entries`` were started in one call at ``at_ns``."""
        if len(entries) == 1:
            self._note((entries[0].set_id, entries[0].name), at_ns)
            return
        key = tuple(map(id, entries))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= 64:
                self._calls.clear()
            call = self._calls[key] = _Call(entries)
        if len(self._together) >= MOST_CALLS:
            self._spread(*self._together.pop(0))
        self._together.append((at_ns, call, []))

    def of(self, what: Bucket | Planned, before_ns: int) -> Sequence[int]:
        """Return the times in ns at which the tensors of a bucket were submitted.

        ``what`` is the bucket, and ``before_ns`` is the time at which the bucket began. The result has one time for
        each tensor, or a single time if one call has started all tensors. An unknown time is replaced by ``before_ns``.
        """
        if isinstance(what, Planned) and (at_ns := self._of_call(what, before_ns)):
            return (at_ns,)
        for call in self._together:
            self._spread(*call)
        self._together.clear()
        return [self._asked((what.set_id, name), before_ns) for name in self._names(what)]

    def _of_call(self, planned: Planned, before_ns: int) -> int:
        """Return the time of the call that started all tensors of the bucket, or 0 if there was no such call."""
        for i in range(len(self._together) - 1, -1, -1):
            at_ns, call, ran = self._together[i]
            if at_ns <= before_ns and call.covers_all(planned) and not any(planned is one for one in ran):
                ran.append(planned)
                if sum(len(one.names) for one in ran) >= len(call.keys):
                    del self._together[i]
                return at_ns
        return 0

    def _spread(self, at_ns: int, call: _Call, ran: Sequence[Planned]) -> None:
        """Record ``at_ns`` as the submission time of each single tensor of ``call``.

        ``ran`` holds the buckets that have already run. Their tensors are left out.
        """
        done = {(planned.set_id, name) for planned in ran for name in planned.names}
        for key in call.keys - done:
            self._note(key, at_ns)

    def _note(self, key: Key, at_ns: int) -> None:
        times = self._ready.get(key)
        if times is None:
            self._ready[key] = [at_ns]
        else:
            times.append(at_ns)
            del times[:-MOST]

    def _names(self, what: Bucket | Planned) -> Sequence[str]:
        """Return the names of the bucket's tensors on this rank."""
        if isinstance(what, Bucket) or all(what.names):
            return what.names
        return [name or self._next_anonymous(what.set_id, spec) for name, spec in zip(what.names, what.specs)]

    def _next_anonymous(self, set_id: int, spec: bytes) -> str:
        """Return the generated name of the oldest call without a name that has not run yet, or "" if there is none.

        Only calls with this process set and ``spec`` count. Calls that were negotiated are skipped, because they have
        already run under their generated names.
        """
        waiting = self._anonymous.get((set_id, spec), deque())
        while waiting:
            name = waiting.popleft()
            if (set_id, name) in self._ready:
                return name
        return ""

    def _asked(self, key: Key, before_ns: int) -> int:
        times = self._ready.get(key)
        if times is None:
            return before_ns
        if len(times) == 1 and times[0] <= before_ns:
            del self._ready[key]
            return times[0]
        known = [at_ns for at_ns in times if at_ns <= before_ns]
        self._ready[key] = [at_ns for at_ns in times if at_ns > before_ns]
        return known[-1] if known else before_ns
