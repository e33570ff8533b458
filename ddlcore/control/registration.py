"""Register the ranks that another launcher has started, and tell these ranks which other ranks have arrived.

A rank arrives by sending an Arrive message. The control network calls this module in place of the coordinator. This
module handles Arrive messages and passes all other messages on to the coordinator. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ddlcore.control.coordinator_protocol import CoordinatorProtocol
from ddlcore.messages.ranks import LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import Arrive, Done, Hello, ToCoordinator
from ddlcore.messages.to_rank import Arrivals, Lost, Outgoing, Refused


class Registration:
    """An implementation of CoordinatorProtocol for ``size`` ranks that another launcher has started.

    ``coordinator`` handles all messages except Arrive. ``arrived`` is called once for each rank, when the rank arrives,
    with the rank and its Arrive message. The attribute ``active`` is the set of ranks that have arrived and have
    neither left nor been lost. ``changed`` is called each time after ``active`` has changed.
    """

    def __init__(
        self,
        size: int,
        coordinator: CoordinatorProtocol,
        arrived: Callable[[LaunchedRank, Arrive], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = size
        self.active: frozenset[LaunchedRank] = frozenset()
        self._coordinator = coordinator
        self._tell = arrived
        self._changed = changed
        self._arrived: dict[LaunchedRank, Arrive] = {}
        self._gone: dict[LaunchedRank, str] = {}  # ranks whose process has ended, with the reason
        self._waiting: dict[tuple[LaunchedRank, ...], set[LaunchedRank]] = {}  # by the ranks that they wait for
        self._worlds: dict[LaunchedRank, tuple[LaunchedRank, ...]] = {}  # the world that each rank last entered

    def missing(self) -> set[LaunchedRank]:
        """Return the ranks that have not arrived and have not ended, so that they may still arrive.

        Any thread may call this.
        """
        everyone = map(LaunchedRank, range(self.size))
        return {rank for rank in everyone if rank not in self._arrived and rank not in self._gone}

    def handle(self, rank: LaunchedRank, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        """Handle ``message`` from ``rank``, and return the messages to send because of this message.

        This class handles Arrive itself, and passes all other messages on to the coordinator. Raises DdlInternalError
        if the coordinator does not allow the message at this time.
        """
        if isinstance(message, Arrive):
            return self._arrive(rank, message)
        outgoing = self._coordinator.handle(rank, message)
        if isinstance(message, Hello):
            self._worlds[rank] = message.ranks
            self._set_active(self.active | {rank})
        elif isinstance(message, Done):
            self._set_active(self.active - {rank})
        self._set_active(self.active - {other for other, told in outgoing if isinstance(told, Refused)})
        return outgoing

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        """Handle the end of a rank, as ``CoordinatorProtocol.rank_ended`` does.

        All ranks that wait for the arrival of ``rank`` get a message Lost. The coordinator handles the end, too. The
        end of rank 0 is handled last, because the coordinator runs in the process of rank 0. All ranks that train
        together with rank 0 then get a message Lost, too.
        """
        self._set_active(self.active - {rank})
        self._gone.setdefault(rank, reason)
        outgoing: Outgoing[LaunchedRank] = []
        for ranks in [ranks for ranks in self._waiting if rank in ranks]:
            outgoing += [(other, self._lost(ranks)) for other in sorted(self._waiting.pop(ranks) - {rank})]
        outgoing += self._coordinator.rank_ended(rank, reason, certain)
        return outgoing + self._dissolve(reason) if rank == 0 else outgoing

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> Outgoing[LaunchedRank]:
        """Tell the coordinator that another process of ``rank`` was started; see ``CoordinatorProtocol``."""
        return self._coordinator.rank_started(rank, host)

    def dismiss(self, ranks: Collection[LaunchedRank], reason: str) -> Outgoing[LaunchedRank]:
        """Tell the coordinator that ``ranks`` must leave the training; see ``CoordinatorProtocol``."""
        return self._coordinator.dismiss(ranks, reason)

    def lost(self) -> dict[LaunchedRank, str]:
        """Return the ranks that the coordinator counts as lost, each with the reason; see ``CoordinatorProtocol``."""
        return self._coordinator.lost()

    def due(self) -> Outgoing[LaunchedRank]:
        """Return the coordinator's messages that are due at this time; see ``CoordinatorProtocol``."""
        return self._coordinator.due()

    def overdue(self, now_s: float) -> list[str]:
        """Return the coordinator's lines for the user about long waits; see ``CoordinatorProtocol``."""
        return self._coordinator.overdue(now_s)

    def _arrive(self, rank: LaunchedRank, arrive: Arrive) -> Outgoing[LaunchedRank]:
        first = self._arrived.get(rank)
        if first is not None and first.token != arrive.token:
            return [(rank, Refused(f"rank {rank} is taken by process {first.pid} on {first.host.partition(':')[0]}"))]
        wanted = tuple(sorted({one for one in arrive.ranks if 0 <= one < self.size}))
        if first is None:
            self._arrived[rank] = arrive
            self._set_active(self.active | {rank})
            self._tell(rank, arrive)
        if not arrive.patient:
            told = {rank, *self._waiting.pop(wanted, ())}
            return [(other, self._arrivals(wanted, arrive.timeout_s)) for other in sorted(told)]
        if self._gone.keys() & set(wanted):
            return [(rank, self._lost(wanted))]
        self._waiting.setdefault(wanted, set()).add(rank)
        outgoing: Outgoing[LaunchedRank] = []
        for ranks in [ranks for ranks in self._waiting if self._arrived.keys() >= set(ranks)]:
            arrivals = self._arrivals(ranks)
            outgoing += [(other, arrivals) for other in sorted(self._waiting.pop(ranks))]
        return outgoing

    def _arrivals(self, ranks: tuple[LaunchedRank, ...], gave_up_s: float = 0.0) -> Arrivals:
        return Arrivals(tuple((rank, self._arrived[rank]) for rank in ranks if rank in self._arrived), gave_up_s)

    def _dissolve(self, reason: str) -> Outgoing[LaunchedRank]:
        """Return one message Lost for each rank whose world (the ranks that it trains with) contains rank 0.

        The coordinator runs in the process of rank 0 and ends with this process. ``reason`` says why this process has
        ended.
        """
        worlds = {rank: self._worlds[rank] for rank in sorted(self.active) if 0 in self._worlds.get(rank, ())}
        return [(rank, Lost((WorldRank(ranks.index(LaunchedRank(0))),), reason)) for rank, ranks in worlds.items()]

    def _lost(self, ranks: tuple[LaunchedRank, ...]) -> Lost:
        gone = next(rank for rank in self._gone if rank in ranks)  # the first one that ended is the cause
        return Lost((WorldRank(ranks.index(gone)),), f"{self._gone[gone]}, before init was complete")

    def _set_active(self, active: frozenset[LaunchedRank]) -> None:
        if active != self.active:
            self.active = active
            self._changed()
