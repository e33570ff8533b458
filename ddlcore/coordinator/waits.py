"""Describes what the coordinator of one world waits for. The stall check (``stall.py``) asks for it.

The ranks' reports about buckets that take long are kept here, because they are used for nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.freezes import Freezes
from ddlcore.coordinator.negotiation import Negotiation
from ddlcore.coordinator.pending_request import PendingRequest
from ddlcore.coordinator.replay_controller import ReplayController
from ddlcore.coordinator.replay_status import Busies, ReplayStatuses
from ddlcore.coordinator.request_table import RequestTable
from ddlcore.coordinator.stall_table import Late
from ddlcore.coordinator.tuning import Tuning
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import Bye


class WorldWaits:
    """The waits of one world, and the ranks' reports about them."""

    def __init__(
        self,
        negotiation: Negotiation,
        replay_controller: ReplayController,
        tuning: Tuning,
        present: Collection[WorldRank],
    ) -> None:
        """Create the object. ``present`` always holds the ranks that have not left the world."""
        self.statuses = ReplayStatuses()
        self.busies = Busies()
        self.freezes = Freezes()
        self._negotiation = negotiation
        self._replay_controller = replay_controller
        self._tuning = tuning
        self._present = present

    def awaited(self, epoch: int, byes: Sequence[tuple[WorldRank, Bye]]) -> list[Awaited[WorldRank]]:
        """Return all waits of the coordinator in ``epoch``, each with the ranks that are waited for.

        These are the waits of pending requests, of a freeze, of a pause in a search for settings, of ``join``, and of
        buckets that ranks have reported as slow. ``byes`` are the ranks that leave as soon as the world has left replay.
        """
        waits: list[Awaited[WorldRank]] = []
        table, freezing = self._negotiation.table, self._replay_controller.freezing
        if freezing:
            where = f"while the ranks leave replay (epoch {epoch})"
            asked = f"to stop launching (Freeze of epoch {epoch})"
            waited_s = self.freezes.waited_s(epoch)
            details = partial(self._missing_in_freeze, epoch, byes)
            waits.append(Awaited(("freeze", epoch), where, asked, details, waited_s))
        else:
            waits += self.statuses.awaited(epoch, self._present)
        for pending in table.all():
            if table.lacking(pending):  # a tensor that all have ready waits only for a freeze or its group
                waits.append(_awaited(pending, table))
        paused = () if freezing else self._tuning.awaited()
        if paused:
            where = f"at the end of a part of the search for settings (epoch {epoch})"
            asked = f"to stop at its end (Resume of epoch {epoch})"
            waits.append(Awaited(("paused", epoch), where, asked, lambda: Details(paused)))
        if table.joined:
            key = ("join", tuple(table.joined), self._negotiation.next_index)
            waits.append(Awaited(key, "in join()", "to take part in a collective, or to join", self._missing_in_join))
        return waits + self.busies.awaited(self._negotiation.sets, self._present)

    def _missing_in_freeze(self, epoch: int, byes: Sequence[tuple[WorldRank, Bye]]) -> Details[WorldRank]:
        sets, table = self._negotiation.sets, self._negotiation.table
        known = self._replay_controller.replaying
        frozen = self._replay_controller.answered
        missing = tuple(rank for rank in self._present if rank not in frozen)
        late = self.freezes.tensors(epoch, known.arranged.buckets, frozen, sets) if known is not None else []
        late += [Late(pending.name, pending.set_id, tuple(pending.ranks()), (), 0.0) for pending in table.complete()]
        notes = [f"rank {rank} leaves: {bye.reason}" for rank, bye in byes]
        return Details(missing, tuple(late), tuple(notes))

    def _missing_in_join(self) -> Details[WorldRank]:
        joined = self._negotiation.table.joined
        missing = tuple(rank for rank in self._present if rank not in joined)
        return Details(missing, (Late("join", 0, tuple(sorted(joined)), missing, 0.0),))


def _awaited(pending: PendingRequest, table: RequestTable) -> Awaited[WorldRank]:
    """Describe the wait for the tensor of ``pending``, which some members have not requested yet."""

    def details() -> Details[WorldRank]:
        missing = tuple(table.missing(pending))
        return Details(missing, (Late(pending.name, pending.set_id, tuple(pending.ranks()), missing, 0.0),))

    return Awaited(pending, "in discovery", "for a sign of life", details)
