"""Runs a collective of a schedule that is no allreduce, and lets another thread continue after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ddlcore.contracts.transport import PreparedMove
from ddlcore.runtime.delivery import Deliver, same, void
from ddlcore.runtime.host_moves import Movement
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.vote import Vote
from ddlcore.runtime.waiter import Waited


class AtomicMove:
    """A function that runs a bucket with one tensor in replay, or a barrier, after a vote of all ranks.

    If some rank has no real data, no rank moves anything, and the bucket is void. ``movement`` and ``prepared`` are None
    for a barrier, which is only the vote. ``told`` are the integers of all ranks; None: only the vote tells them.
    """

    __slots__ = ("_begun", "_movement", "_prepared", "_told", "_vote", "resumable")

    def __init__(
        self,
        vote: Vote,
        movement: Movement | None,
        prepared: PreparedMove | None,
        resumable: bool,
        told: Sequence[int] | None = None,
    ) -> None:
        self._vote = vote
        self._told = told
        self._movement = movement
        self._prepared = prepared
        self._begun = -1  # the number of the last launch for which the movement has its memory
        self.resumable = resumable  # whether a user thread may run it, which Ctrl-C may interrupt

    def __call__(self, launch: Launch[Entry], use: str) -> Deliver:
        if launch.entries is None:
            self._vote.cast((), False)
            return void
        entry = launch.entries[0]
        if not self._vote.cast(self._mine(entry), True):
            return void
        deliver = self._move(entry, launch.number)
        self.forget()
        return deliver

    def resume(self, launch: Launch[Entry], operation: Waited | None = None) -> Deliver | None:
        """Begin to run the bucket, or continue after an interruption; see AtomicAllreduce.resume."""
        assert launch.entries is not None
        # A signal handler may end this method between any two instructions, and then the engine calls it again for the
        # same launch. Until ``_begun`` is stored, nothing has been moved, and the vote recognizes the ticket. After
        # that, the movement keeps its memory, and the prepared move recognizes the ticket: it does not move a second
        # time what other ranks send only once.
        entry = launch.entries[0]
        if self._begun != launch.number:
            mine = self._mine(entry)
            unanimous = None
            while unanimous is None:  # Ctrl-C may interrupt the thread between two tries
                unanimous = self._vote.try_cast(mine, launch.number)
                if unanimous is None and operation is not None and not operation.pending:
                    return None
            if not unanimous:
                return void
        deliver = self._move(entry, launch.number)
        if operation is None:  # no signal interrupts the engine
            self.forget()
        return deliver

    def _move(self, entry: Entry, number: int) -> Deliver:
        movement = self._movement
        if movement is None or self._prepared is None:
            return _BARRIER
        if self._begun != number:
            movement.begin(entry, self._vote.told() if self._told is None else self._told)
            self._begun = number
        self._prepared.run(movement.source, movement.target, movement.counts, number)
        return partial(same, [movement.end(entry)])

    def _mine(self, entry: Entry) -> tuple[int, ...]:
        """Wait until the source of ``entry`` may be read, and return the integers that this rank tells."""
        given = entry.given
        if given.source is not None and given.source.wait is not None:
            given.source.wait()
        return given.rows if self._told is None else ()

    def forget(self) -> None:
        """Drop the memory of the last launch, whose results have been delivered or are kept for later."""
        if self._movement is not None:
            self._movement.forget()


_BARRIER: Deliver = partial(same, [None])
