"""The one boundary between the user's threads and ddl's: what was asked for and has not come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from ddlcore.messages import Request
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.request import Entry

__all__ = ["Inbox"]


class Inbox:
    """Entries by (process set, name). Any thread may submit; the control thread takes requests out."""

    def __init__(self, completion: Completion, wake: Callable[[], None]) -> None:
        self._completion = completion
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], Entry] = {}
        self._unsent: list[Entry] = []
        self._unanswered = False  # one request is unanswered at a time; what comes later joins the next
        self._serial = 0
        self._anonymous: dict[int, int] = {}
        self._generation = 0  # how many times all ranks have joined
        self._refusal: Callable[[], BaseException] | None = None

    def submit(self, entries: Sequence[Entry]) -> None:
        """Takes all of them, or none: ValueError for a name in flight; the job's error once it is over."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            for entry in entries:
                if (entry.set_id, entry.name) in self._pending:
                    raise ValueError(
                        f"{entry.name!r} is already in flight on this rank; wait for its handle first, "
                        "or give each call a name of its own"
                    )
            for entry in entries:
                self._pending[entry.set_id, entry.name] = entry
            self._unsent += entries
            wake = not self._unanswered
        if wake:
            self._wake()

    def anonymous(self, set_id: int) -> str:
        """The name of the next call without one: its ordinal in the process set, whatever its kind.

        One count over all kinds lets the coordinator see that two ranks ask for different things.
        """
        with self._lock:
            ordinal = self._anonymous.get(set_id, 0)
            self._anonymous[set_id] = ordinal + 1
            return f"noname.{self._generation}.{ordinal}"

    def next_generation(self) -> None:
        """All ranks have joined: some of them had made fewer calls, so the count begins anew on all."""
        with self._lock:
            self._generation += 1
            self._anonymous.clear()

    def take_request(self, epoch: int) -> Request | None:
        """What is ready and unsent, if the last request has been answered."""
        with self._lock:
            if self._unanswered or not self._unsent:
                return None
            self._unanswered = True
            self._serial += 1
            stamp = self._completion.observed
            asks = tuple(entry.ask(stamp) for entry in self._unsent)
            self._unsent.clear()
            return Request(epoch, self._serial, asks)

    def answered(self, serial: int) -> None:
        """The request ``serial`` has its answer: the next may go out."""
        with self._lock:
            if serial == self._serial:
                self._unanswered = False

    def take(self, set_id: int, names: Iterable[str]) -> list[Entry | None]:
        """The entries of a batch, out of the inbox; None for what this rank has not asked for (it has joined)."""
        with self._lock:
            return [self._pending.pop((set_id, name), None) for name in names]

    def close(self, refusal: Callable[[], BaseException]) -> list[Entry]:
        """No more is taken: ``submit`` raises what ``refusal`` makes. Returns what was pending."""
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
            left = list(self._pending.values())
            self._pending.clear()
            self._unsent.clear()
            return left

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """As ``close``, but what is pending stays pending: it may still be part of a promised batch."""
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
