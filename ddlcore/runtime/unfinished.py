"""Keeps the operations that a rank has submitted and that have not ended, by process set and name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddlcore.errors import InvalidArgument
from ddlcore.runtime.request import DECIDED, IDLE, PENDING, Entry, PersistentRequest


class Unfinished:
    """The entries of one rank that are in flight, and its persistent requests, also the idle ones.

    The caller holds the lock of the tensor queue, except for single operations on ``entries``.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], Entry] = {}  # from submit until taken or delivered
        self.requests: dict[tuple[int, str], PersistentRequest] = {}  # those that were started

    def require_free(self, entries: Iterable[Entry]) -> None:
        """Raise InvalidArgument if the name of one of ``entries`` is in flight on this rank.

        If an idle persistent request has such a name, forget that request: the entry takes over the name.
        """
        for entry in entries:
            key = (entry.set_id, entry.name)
            other = self.requests.get(key)
            if key in self.entries or (other is not None and other.state != IDLE):
                raise InvalidArgument(
                    f"{entry.name!r} is already in flight on this rank; wait for its handle first, "
                    "or give each call a name of its own"
                )
            if other is not None and other is not entry:  # a request for another tensor takes over the name
                other.replay = other
                del self.requests[key]

    def find(self, set_id: int, name: str) -> Entry | None:
        """Return the entry with this name that is not decided yet, or None if there is none."""
        entry = self.entries.get((set_id, name))
        if entry is None:
            request = self.requests.get((set_id, name))
            entry = request if request is not None and request.state == PENDING else None
        return entry

    def find_all(self, set_id: int, names: Sequence[str]) -> list[Entry] | None:
        """Return the entries with these names, in their order. Return None if one of them is not found."""
        found = [self.find(set_id, name) for name in names]
        entries = [entry for entry in found if entry is not None]
        return entries if len(entries) == len(found) else None

    def take(self, set_id: int, name: str) -> Entry | None:
        """Return what ``find`` returns, for a negotiated bucket. An entry is removed; a request becomes DECIDED."""
        entry = self.entries.pop((set_id, name), None)
        if entry is None:
            entry = self.find(set_id, name)
            if isinstance(entry, PersistentRequest):
                entry.state = DECIDED
        return entry

    def retire(self, entries: Iterable[PersistentRequest]) -> None:
        """Forget those requests of ``entries`` that are idle. A forgotten request may be started again later."""
        for entry in entries:
            key = (entry.set_id, entry.name)
            if entry.state == IDLE and self.requests.get(key) is entry:
                entry.replay = entry
                del self.requests[key]

    def forget(self, set_id: int) -> None:
        """Forget the idle persistent requests of process set ``set_id``, which has been removed."""
        self.requests = {key: one for key, one in self.requests.items() if key[0] != set_id or one.state != IDLE}

    def pending(self) -> list[Entry]:
        """Return all entries in flight, except for the requests that are in a negotiated bucket."""
        return [*self.entries.values(), *(one for one in self.requests.values() if one.state == PENDING)]

    def __iter__(self) -> Iterator[Entry]:
        """Yield all entries in flight."""
        yield from self.entries.values()
        yield from (one for one in self.requests.values() if one.state != IDLE)
