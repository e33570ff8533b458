"""Completes the operations of a bucket that has run, and wakes the threads that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ddlcore.runtime.completion import Completion
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import IDLE, Entry, PersistentMove, PersistentRequest
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.tensor_queue import TensorQueue


class Landing:
    """Delivers complete and valid buckets. Only the thread that runs buckets uses this object.

    A signal handler may interrupt that thread if it is a user thread. Then ``launch`` is the bucket that was being
    delivered, and the engine's thread continues by ``finish``.
    """

    def __init__(self, tensor_queue: TensorQueue, completion: Completion) -> None:
        self._tensor_queue = tensor_queue
        self._completion = completion
        self.launch: Launch[Entry] | None = None  # complete and valid, but not delivered yet
        self.rest: Iterator[Entry] = iter(())  # its entries that are still to be delivered
        self.outcomes: Sequence[Outcome | None] = ()  # of all its entries
        self.mixed = False  # some of the entries belong to handles

    def finish(self, after: deque[Any]) -> None:
        """Deliver the rest of the bucket ``launch``. ``after``: see ``complete``."""
        launch = self.launch
        assert launch is not None and launch.entries is not None
        self._tensor_queue.delivered(launch)
        self.complete(launch.entries, self.outcomes, self.rest, -1, after)

    def complete(
        self,
        entries: Sequence[Entry | None],
        outcomes: Sequence[Outcome | None],
        rest: Iterator[Entry | None],
        index: int,
        after: deque[Any],
    ) -> None:
        """Complete those entries of a bucket that ``rest`` still yields, and wake the threads that wait for them.

        ``entries`` and ``outcomes`` are those of the whole bucket. ``index`` is the bucket's index at the coordinator,
        or -1 in replay. Functions that were given to ``Handle.then`` are appended to ``after``. Each entry is completed
        by a sequence of plain stores, or by a call whose repetition has no effect. So this method may be interrupted at
        any point and then called again with the same ``rest``.
        """
        with self._completion.lock:
            self._complete_each(entries, outcomes, rest, index, after)
        # All entries change before ``announce`` wakes the waiters: a waiter that is woken first would see its operation
        # still pending, and would sleep again until its time slice ends.
        self._completion.announce()

    def _complete_each(
        self,
        entries: Sequence[Entry | None],
        outcomes: Sequence[Outcome | None],
        rest: Iterator[Entry | None],
        index: int,
        after: deque[Any],
    ) -> None:
        """Do the work of ``complete`` that needs the completion's lock. The caller holds the lock."""
        entry: Any
        for entry in rest:
            kind = entry.__class__  # type() is a call, after which a handler may raise
            if kind is PersistentMove:  # the only entry of its bucket; complete() would be a call
                given: Any = entry.source.owner
                given.outcome = outcomes[0]
                given.done = True
            elif kind is not PersistentRequest:
                self.mixed = self.mixed or entry is not None
                continue
            entry.index = index
            entry.source.owner = None
            entry.state = IDLE
        if self.mixed:
            for entry, outcome in zip(entries, outcomes):
                if entry is not None and entry.__class__ not in (PersistentRequest, PersistentMove):
                    entry.handle.complete(entry.number, outcome, index)
                    entry.handle.pass_on(after)
        self.launch = None
