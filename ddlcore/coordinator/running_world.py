"""Holds what belongs to one world while it runs, and translates between its ranks and those of the launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlcore.coordinator.agreed_point import AgreedPoint
from ddlcore.coordinator.agreement import Agreement
from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.entering import WorldKey
from ddlcore.coordinator.stall import StallWatch
from ddlcore.messages.observing import Digests, Sample, Settle
from ddlcore.messages.ranks import LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import COMMIT, STOP, CallCount, StopRequest
from ddlcore.messages.to_rank import Outgoing
from ddlcore.runtime.patience import Patience


@dataclass
class RunningWorld:
    """One world that has begun: its coordinator, and all else on which its ranks agree or for which they wait."""

    key: WorldKey
    coordinator: Coordinator
    patience: Patience
    active: set[LaunchedRank]  # the launched ranks that have not sent Done
    leaving: set[LaunchedRank] = field(default_factory=set)  # those of ``active`` that have sent Bye

    def __post_init__(self) -> None:
        ranks = tuple(map(WorldRank, range(len(self.key[0]))))
        self.points = {kind: AgreedPoint(kind, ranks) for kind in (STOP, COMMIT)}
        self.agreement = Agreement(len(self.key[0]), self.coordinator.sets, lambda: self.coordinator.table.joined)
        self.inward = dict(zip(self.key[0], ranks, strict=True))  # launched rank: rank in this world
        self.watch = StallWatch(self._awaited, ranks, self.patience, ranks)

    def _awaited(self) -> list[Awaited[WorldRank]]:
        """Return everything for which somebody in this world waits.

        The coordinator waits for ranks, and ranks wait for agreed calls and in ``shutdown``. Ranks that still run after
        other ranks have left are in the list, too.
        """
        waits = self.coordinator.awaited()
        for point in self.points.values():
            waits += point.awaited()
        own = {rank: self.inward[rank] for rank in sorted(self.active)}
        leaving = tuple(one for rank, one in own.items() if rank in self.leaving and self.coordinator.parted(one))
        if leaving:
            text = "in shutdown()"
            asked = "to let go of everything (Farewell)"
            waits.append(Awaited(("leaving", leaving), text, asked, lambda: Details(leaving), only_silent=True))
        staying = tuple(one for rank, one in own.items() if rank not in self.leaving)
        if staying and len(self.active) < len(self.key[0]):
            text = "after other ranks have left"
            rest = Awaited(
                ("staying", staying),
                text,
                "for a sign of life",
                lambda: Details(staying),
                only_silent=True,
                ends=self.patience.evicts,
            )
            waits.append(rest)
        return waits

    def agree(self, launched: LaunchedRank, message: Digests | Sample | Settle | None) -> Outgoing[LaunchedRank]:
        """Handle the report of a rank about its model parameters, and return the messages to send.

        ``launched`` is the rank's number in the launch. ``message`` is None if the rank will send no more reports.
        """
        rank, agreement = self.inward[launched], self.agreement
        if isinstance(message, Digests):
            return self.outward(agreement.hear(rank, message))
        if isinstance(message, Sample):
            return self.outward(agreement.sampled(rank, message))
        if isinstance(message, Settle):
            return self.outward(agreement.settle(rank))
        return self.outward(agreement.gone(rank))

    def point(self, launched: LaunchedRank, message: StopRequest | CallCount | None) -> Outgoing[LaunchedRank]:
        """Handle a rank's message about a call at which all ranks act together, and return the messages to send.

        ``launched`` is the rank's number in the launch. ``message`` is None if the rank has left the world. See
        coordinator.agreed_point.
        """
        rank, joined = self.inward[launched], self.coordinator.table.joined
        if isinstance(message, StopRequest):
            return self.asked(STOP, message.reason)
        if isinstance(message, CallCount):
            return self.outward(self.points[message.kind].counted(rank, message, joined))
        return self.outward([told for point in self.points.values() for told in point.gone(rank, joined)])

    def asked(self, kind: str, reason: str) -> Outgoing[LaunchedRank]:
        """Have the ranks agree at which call of ``kind`` they act, and return the messages to send.

        ``reason`` says why, in words for the user.
        """
        return self.outward(self.points[kind].asked(reason))

    def outward(self, outgoing: Outgoing[WorldRank]) -> Outgoing[LaunchedRank]:
        """Return ``outgoing`` with the ranks' numbers in the launch instead of their numbers in this world."""
        return [(self.key[0][rank], message) for rank, message in outgoing]
