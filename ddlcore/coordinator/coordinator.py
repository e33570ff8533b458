"""Decides which buckets the ranks of one world run: handles the ranks' messages and returns the messages to send.

The coordinator is a state machine without I/O: it has no socket, no thread and no clock. It knows the specs of tensors,
never their values. All ranks get the buckets of all process sets in the same order. So two ranks can never run two
collectives in opposite orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.awaited import Awaited
from ddlcore.coordinator.items import Items, answers, shared
from ddlcore.coordinator.negotiation import Negotiation
from ddlcore.coordinator.pending_request import PendingRequest
from ddlcore.coordinator.replay_controller import KnownSchedule, ReplayController
from ddlcore.coordinator.request_table import RequestTable
from ddlcore.coordinator.tuning import SearchDriver, Tuning
from ddlcore.coordinator.waits import WorldWaits
from ddlcore.messages.observing import Busy, ReplayStatus, Where
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import Bye, Frozen, Leave, Paused, Request
from ddlcore.messages.to_rank import Drain, Farewell, Freeze, Lost, Outgoing
from ddlcore.types import Value


class Coordinator:
    """The coordinator of one world of ``size`` ranks. It handles the ranks' messages and returns messages to send."""

    def __init__(
        self,
        size: int,
        policy: FusionPolicy,
        fusion_bytes: int,
        replay: bool = True,
        first_bucket_bytes: int = 0,
        overlap: bool = True,
        driver: SearchDriver | None = None,
        compression: str = "none",
        join_average: str = "contributors",
    ) -> None:
        """Create the coordinator of a world that begins.

        ``join_average``: by what averages are divided while some ranks have joined: "contributors" or "size".
        ``compression``: the setting, which applies to tensors whose spec leaves the compressor to it, see
        ``Spec.compressor_by``. ``driver`` searches for better settings while the world runs.
        """
        self.epoch = 0  # grows with each change from negotiation to replay or back
        self.table = RequestTable()
        self._left: dict[WorldRank, str] = {}  # ranks that have left, with their reason
        self._has_told_loss = False  # then all ranks know that the job has failed
        self._present = dict.fromkeys(map(WorldRank, range(size)))  # the ranks that have not left, in order
        sizes = {"fusion_bytes": fusion_bytes, "first_bucket_bytes": first_bucket_bytes}
        layout: dict[str, Value] = {**sizes, "overlap": "on" if overlap else "off", "compression": compression}
        self.replay_controller = ReplayController(policy, _params(layout), self.table.spec, replay)
        self.replay_controller.compression = compression
        self.tuning = Tuning(driver, layout)
        divides_by_size = join_average == "size"
        self._negotiation = Negotiation(
            size, policy, fusion_bytes, divides_by_size, self.table, self.replay_controller, self._left
        )
        self.sets = self._negotiation.sets
        # Byes sent during replay; they take effect when replay has been left.
        self._byes: list[tuple[WorldRank, Bye]] = []
        self._diverged = False  # a rank cannot continue with the schedule
        self._slow = False  # a rank only suspects that it cannot continue
        self._waits = WorldWaits(self._negotiation, self.replay_controller, self.tuning, self._present)

    # --- messages in, messages out

    def handle(
        self, rank: WorldRank, message: Request | Bye | Leave | Frozen | ReplayStatus | Busy | Paused
    ) -> Outgoing[WorldRank]:
        """Handle ``message`` from ``rank``. Return the messages to send, each with the rank that must get it."""
        if isinstance(message, Bye):
            return self._bye(rank, message)
        if isinstance(message, Busy):
            self._waits.busies.hear(rank, message)
            return []
        if message.epoch != self.epoch or rank in self._left:
            return []  # the rank sends everything pending again when it enters the present epoch
        if isinstance(message, ReplayStatus):
            asked = self._waits.statuses.hear(rank, message, self.sets.get(message.set_id, ()))
            return [(other, Where(self.epoch)) for other in asked if other not in self._left]
        if isinstance(message, Paused):
            return self._next_trial(rank, message)
        if isinstance(message, Frozen):
            return self._drain() if self.replay_controller.frozen(rank, message, self._present) else []
        if isinstance(message, Leave):
            self._waits.freezes.leave(rank, message, self.epoch)
            # A rank that sends Leave during another freeze will send it again after that freeze if it still has to
            # leave.
            if self.replay_controller.replaying is not None and not self.replay_controller.freezing:
                self._diverged = self._diverged or not message.slow
                self._slow = message.slow
            return self._freeze()
        if self.replay_controller.freezing:
            return []
        ready, items = self._negotiation.requested(rank, message.asks)
        if self.replay_controller.replaying is not None:
            return self._beside_replay(ready, items, rank, message.serial)
        items += self._decide(ready)
        return answers(self.epoch, items, self._left, rank, message.serial)

    def lost(self, rank: WorldRank, reason: str) -> Outgoing[WorldRank]:
        """Record that ``rank`` is lost for ``reason``, and return the messages that inform all other ranks.

        No operation that needs this rank can run any more. The first loss has ended the job on all ranks, so further ones
        are not told: in an elastic job, all survivors leave one after the other, and each would tell all others.
        """
        self._left[rank] = reason
        self._present.pop(rank, None)
        self.tuning.stop()
        if self._has_told_loss:
            return []
        self._has_told_loss = True
        lost = Lost((rank,), reason)
        return [(other, lost) for other in self._present]

    # --- what is waited for

    def parted(self, rank: WorldRank) -> bool:
        """Return whether ``rank`` has left or was lost, so that no more messages will be sent to it."""
        return rank in self._left

    def awaited(self) -> list[Awaited[WorldRank]]:
        """Return all waits of the coordinator. The stall check calls this about once a second."""
        return self._waits.awaited(self.epoch, self._byes)

    # --- into replay

    def _decide(self, ready: Iterable[PendingRequest]) -> Items:
        """Decide what runs of the requests ``ready``, and return the items that must be sent."""
        items, known = self._negotiation.decide(ready)
        return items if known is None else items + self._resume(known)

    def _resume(self, known: KnownSchedule) -> Items:
        """Return the items that make all ranks replay the schedule ``known`` from now on.

        All pending requests are forgotten here. The ranks put their pending tensors into the slots of the schedule, or
        request them again.
        """
        self.epoch += 1
        self.table.clear()
        items: Items = []
        periods = 0
        if self.tuning.tunes(known):
            used = frozenset(rank for planned in known.arranged.buckets for rank in self.sets[planned.set_id])
            aligned = known.align()
            periods, adjust = self.tuning.begin(aligned, used)
            items += [(self._present, one) for one in adjust]
            if aligned:
                layout = self.tuning.layout
                self._negotiation.params["fusion_bytes"] = float(layout["fusion_bytes"])
                self.replay_controller.compression = str(layout["compression"])
                self.replay_controller.lay_out_anew(known, _params(layout))
        if not known.told:
            known.told = True
            items.append((self._present, known.arranged))
        return [*items, (self._present, self.replay_controller.resume(known, self.epoch, periods))]

    def _next_trial(self, rank: WorldRank, message: Paused) -> Outgoing[WorldRank]:
        """Handle the message Paused of ``rank``: the rank has reached the end of a trial of settings.

        If all ranks have paused, begin the next trial, perhaps with other buckets. Return the messages to send. All
        ranks have stopped at the same place, because a trial ends at the end of a period (a pass through the schedule).
        """
        known = self.replay_controller.replaying
        if known is None or self.replay_controller.freezing or not self.tuning.paused(rank, message):
            return []
        known.ended()
        items = self._resume(known)  # begins a new epoch
        return answers(self.epoch, items, self._left)

    # --- beside and after replay

    def _beside_replay(
        self, ready: Iterable[PendingRequest], items: Items, rank: WorldRank, serial: int
    ) -> Outgoing[WorldRank]:
        """Handle the requests that ``rank`` has sent while a schedule is replayed. Return the messages to send.

        ``ready`` are the requests that are complete, because all members have sent them. If such a request is for a
        negotiated slot, run the bucket of the slot. If it is for a tensor that is not in the schedule, interrupt the
        replay, so that the tensor can be reduced. ``items`` are further items to send. ``serial`` is the number of the
        rank's message.
        """
        insert = bool(self.table.joined)
        calls: dict[object, tuple[bool, bool]] = {}  # a grouped call may have thousands of tensors: look at it once
        for pending in dict.fromkeys(ready):
            call = self.table.call_of(pending)
            if call not in calls:
                calls[call] = self.table.is_torn(pending), bool(self.table.complete_group(pending))
            torn, complete = calls[call]
            text = self.table.objection(pending)
            if torn:
                self._diverged = insert = True
            elif text:
                items += self._negotiation.fail(pending, "mismatch", text)
            elif self.replay_controller.is_negotiated_slot(self.table.key(pending)) and not self.table.joined:
                self.table.take(pending)
                items.append(self._negotiation.run([pending]))
            elif complete:
                insert = True
        return answers(self.epoch, items, self._left, rank, serial) + (self._freeze() if insert else [])

    def _freeze(self) -> Outgoing[WorldRank]:
        if self.replay_controller.replaying is None or self.replay_controller.freezing:
            return []
        self.tuning.left()
        self.replay_controller.freeze()
        freeze = Freeze(self.epoch)
        return [(rank, freeze) for rank in self._present]

    def _drain(self) -> Outgoing[WorldRank]:
        """Return the messages that end the replay, after every rank has stopped launching.

        The messages say which of the launched buckets are valid. They also contain the items that the ranks must
        process after the drain.
        """
        # Everything that is decided here is sent in the same message as Drain, and after it: a rank first enters the
        # buckets that its peers have launched, and only then the new ones. Otherwise two ranks might enter two
        # collectives in opposite orders and block each other.
        drain = self.replay_controller.drain(self.epoch, self.sets)
        diverged, slow, self._diverged, self._slow = self._diverged, self._slow, False, False
        # After a divergence the ranks request everything again: of tensors that belong together, some may be in slots
        # and others in requests.
        anew = diverged or slow
        complete = [] if anew else self.table.complete()
        known = self.replay_controller.left(diverged, [self.table.key(pending) for pending in complete], slow)
        self.epoch += 1
        items = self._decide(complete)
        stays = known is not None and known.whole and not self.table.joined and not self._byes
        if self.replay_controller.replaying is None and known is not None and stays:
            items += self._resume(known)
        elif self.replay_controller.replaying is None:
            self.table.clear()
            self.table.none_joined()  # these ranks send join again, together with all that is pending
        outgoing: Outgoing[WorldRank] = []
        for ranks, told in shared(items, self._present):
            one = Drain(drain.epoch, drain.highest, drain.lowest, told)
            outgoing += [(rank, one) for rank in ranks if rank not in self._left]  # a lost rank gets no message
        byes, self._byes = self._byes, []
        for rank, bye in byes:
            outgoing += self._bye(rank, bye)
        return outgoing

    # --- leaving

    def _bye(self, rank: WorldRank, bye: Bye) -> Outgoing[WorldRank]:
        if bye.broken:
            return self.lost(rank, bye.reason)
        if rank in self._left:
            return []
        if self.replay_controller.replaying is not None:
            self._byes.append((rank, bye))
            return self._freeze()
        self.tuning.stop()
        self.replay_controller.parted(rank, self.sets)
        self._left[rank] = bye.reason
        del self._present[rank]
        items = self._negotiation.parted(rank)
        return [*answers(self.epoch, items, self._left), (rank, Farewell())]


def _params(layout: Mapping[str, Value]) -> dict[str, float]:
    """Return the settings with which the fusion policy arranges the buckets of a whole period: numbers by name."""
    numbers = {name: float(value) for name, value in layout.items() if not isinstance(value, str)}
    return {**numbers, "overlap": float(layout["overlap"] == "on")}
