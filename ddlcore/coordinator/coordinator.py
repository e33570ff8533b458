"""Decides which buckets the ranks of one world run: handles the ranks' messages and returns the messages to send.

The coordinator is a state machine without I/O: it has no socket, no thread and no clock. It knows the specs of tensors,
never their values. All ranks get the buckets of all process sets in the same order. So two ranks can never run two
collectives in opposite orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from msgspec import DecodeError

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.freezes import Freezes
from ddlcore.coordinator.pending_request import PendingRequest
from ddlcore.coordinator.replay_controller import KnownSchedule, ReplayController
from ddlcore.coordinator.replay_status import Busies, ReplayStatuses
from ddlcore.coordinator.request_table import RequestTable
from ddlcore.coordinator.stall_table import Late
from ddlcore.coordinator.tuning import SearchDriver, Tuning
from ddlcore.messages.observing import Busy, ReplayStatus, Where
from ddlcore.messages.spec import BY_SETTING, Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Frozen, Leave, Paused, Request
from ddlcore.messages.to_rank import (
    Adjust,
    Answer,
    Arranged,
    Bucket,
    Drain,
    Failure,
    Farewell,
    Freeze,
    FromCoordinator,
    Lost,
    Resume,
)
from ddlcore.runtime.checks import describe, flaw
from ddlcore.types import Kind, Value

Item = Bucket | Failure | Arranged | Resume | Adjust
Outgoing = list[tuple[int, FromCoordinator]]


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
        self.size = size
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.epoch = 0  # grows with each change from negotiation to replay or back
        self.params: dict[str, float] = {"fusion_bytes": fusion_bytes}
        self._policy = policy
        self._divides_by_size = join_average == "size"
        self.table = RequestTable()
        self._left: dict[int, str] = {}  # ranks that have left, with their reason
        self._has_told_loss = False  # then all ranks know that the job has failed
        self._present = dict.fromkeys(range(size))  # the ranks that have not left, in order
        self._next_index = 0
        self._next_set = 1
        # The parameters by which a whole period is arranged in buckets.
        whole = {**self.params, "first_bucket_bytes": float(first_bucket_bytes), "overlap": float(overlap)}
        self.replay_controller = ReplayController(policy, whole, self.table.spec, replay)
        self.replay_controller.compression = compression
        sizes: dict[str, Value] = {"fusion_bytes": fusion_bytes, "first_bucket_bytes": first_bucket_bytes}
        self.tuning = Tuning(driver, {**sizes, "overlap": "on" if overlap else "off", "compression": compression})
        self._byes: list[tuple[int, Bye]] = []  # Byes sent during replay; they take effect when replay has been left
        self._diverged = False  # a rank cannot continue with the schedule
        self._slow = False  # a rank only suspects that it cannot continue
        self._statuses = ReplayStatuses()
        self._busies = Busies()
        self._freezes = Freezes()

    # --- messages in, messages out

    def handle(self, rank: int, message: Request | Bye | Leave | Frozen | ReplayStatus | Busy | Paused) -> Outgoing:
        """Handle ``message`` from ``rank``. Return the messages to send, each with the rank that must get it."""
        if isinstance(message, Bye):
            return self._bye(rank, message)
        if isinstance(message, Busy):
            self._busies.hear(rank, message)
            return []
        if message.epoch != self.epoch or rank in self._left:
            return []  # the rank sends everything pending again when it enters the present epoch
        if isinstance(message, ReplayStatus):
            asked = self._statuses.hear(rank, message, self.sets.get(message.set_id, ()))
            return [(other, Where(self.epoch)) for other in asked if other not in self._left]
        if isinstance(message, Paused):
            return self._next_trial(rank, message)
        if isinstance(message, Frozen):
            return self._drain() if self.replay_controller.frozen(rank, message, self._present) else []
        if isinstance(message, Leave):
            self._freezes.leave(rank, message, self.epoch)
            # A rank that sends Leave during another freeze will send it again after that freeze if it still has to
            # leave.
            if self.replay_controller.replaying is not None and not self.replay_controller.freezing:
                self._diverged = self._diverged or not message.slow
                self._slow = message.slow
            return self._freeze()
        if self.replay_controller.freezing:
            return []
        ready: list[PendingRequest] = []
        items: list[tuple[Iterable[int], Item]] = []
        bit, find, joined = 1 << rank, self.table.find, self.table.joined
        for ask in message.asks:
            pending = find((ask.set_id, ask.name))
            if pending is None or ask.spec != pending.spec or self._left or not pending.members & bit:
                pending = self._admit(rank, ask, ready, items)
                if pending is None:
                    continue
            pending.add(rank, bit, ask)
            if pending.asked == pending.members or (joined and not self.table.lacking(pending)):
                ready.append(pending)
        if self.replay_controller.replaying is not None:
            return self._beside_replay(ready, items, rank, message.serial)
        items += self._decide(ready)
        return self._answers(items, rank, message.serial)

    def lost(self, rank: int, reason: str) -> Outgoing:
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

    def parted(self, rank: int) -> bool:
        """Return whether ``rank`` has left or was lost, so that no more messages will be sent to it."""
        return rank in self._left

    def awaited(self) -> list[Awaited]:
        """Return all waits of the coordinator, each with the ranks that are waited for.

        These are the waits of pending requests, of a freeze, of a pause in a search for settings, of ``join``, and of
        buckets that ranks have reported as slow. The stall check calls this about once a second.
        """
        waits: list[Awaited] = []
        freezing = self.replay_controller.freezing
        if freezing:
            where = f"while the ranks leave replay (epoch {self.epoch})"
            asked = f"to stop launching (Freeze of epoch {self.epoch})"
            waited_s = self._freezes.waited_s(self.epoch)
            waits.append(Awaited(("freeze", self.epoch), where, asked, self._missing_in_freeze, waited_s))
        else:
            waits += self._statuses.awaited(self.epoch, self._present)
        for pending in self.table.all():
            if self.table.lacking(pending):  # a tensor that all have ready waits only for a freeze or its group
                waits.append(_awaited(pending, self.table))
        paused = () if freezing else self.tuning.awaited()
        if paused:
            where = f"at the end of a part of the search for settings (epoch {self.epoch})"
            asked = f"to stop at its end (Resume of epoch {self.epoch})"
            waits.append(Awaited(("paused", self.epoch), where, asked, lambda: Details(paused)))
        if self.table.joined:
            key = ("join", tuple(self.table.joined), self._next_index)
            waits.append(Awaited(key, "in join()", "to take part in a collective, or to join", self._missing_in_join))
        return waits + self._busies.awaited(self.sets, self._present)

    def _missing_in_freeze(self) -> Details:
        known = self.replay_controller.replaying
        frozen = self.replay_controller.answered
        missing = tuple(rank for rank in self._present if rank not in frozen)
        late = self._freezes.tensors(self.epoch, known.arranged.buckets, frozen, self.sets) if known is not None else []
        late += [
            Late(pending.name, pending.set_id, tuple(pending.ranks()), (), 0.0) for pending in self.table.complete()
        ]
        notes = [f"rank {rank} leaves: {bye.reason}" for rank, bye in self._byes]
        return Details(missing, tuple(late), tuple(notes))

    def _missing_in_join(self) -> Details:
        missing = tuple(rank for rank in self._present if rank not in self.table.joined)
        return Details(missing, (Late("join", 0, tuple(sorted(self.table.joined)), missing, 0.0),))

    # --- asking

    def _admit(
        self, rank: int, ask: Ask, ready: list[PendingRequest], items: list[tuple[Iterable[int], Item]]
    ) -> PendingRequest | None:
        """Return the pending request to which ``ask`` belongs. Create the pending request if there is none.

        If ``ask`` is invalid, append a Failure to ``items`` and return None. If ``ask`` is a call of ``join``, return
        None, too. In this case, append to ``ready`` the requests that are complete because of this join. If all ranks
        have joined now, also append to ``items`` what must be sent because of that.
        """
        members = self.sets.get(ask.set_id)
        if members is None or rank not in members:
            text = f"{describe([ask.name], ask.set_id)}: rank {rank} is not in such a process set (any more)"
            items.append(((rank,), Failure(ask.set_id, (ask.name,), "mismatch", text)))
            return None
        gone = [left for left in self._left if left in members]  # in order of leaving: the first one is the cause
        if gone:
            items.append(((rank,), self._gone(ask.set_id, (ask.name,), gone)))
            return None
        try:
            spec = self.table.spec(ask.spec)
            text = flaw(ask, spec, members, self.size)
        except DecodeError as error:
            text = f"its request cannot be read: {error}"
        if text:
            text = f"{describe([ask.name], ask.set_id)}: {text}"
            items.append(((rank,), Failure(ask.set_id, (ask.name,), "mismatch", text)))
            return None
        if spec.kind is Kind.JOIN:
            self.replay_controller.disturbed()
            ready += self.table.join(rank, ask)
            if len(self.table.joined) == self.size:
                items += [(p_members, item) for p_members, item in self._decide(ready)]
                ready.clear()
                items += self._all_joined()
            return None
        return self.table.open(ask, members)

    def _all_joined(self) -> list[tuple[Iterable[int], Item]]:
        last = list(self.table.joined)[-1]
        names = {rank: ask.name for rank, ask in self.table.joined.items()}
        self.table.none_joined()
        index = self._take_index()
        return [((rank,), Bucket(index, 0, Kind.JOIN, (name,), result=last)) for rank, name in names.items()]

    # --- deciding

    def _decide(self, ready: Sequence[PendingRequest]) -> list[tuple[Iterable[int], Item]]:
        """Check the requests ``ready``, which all members have sent, and arrange them in buckets, in the given order.

        Return the items that must be sent, each with the ranks that must get it.
        """
        items: list[tuple[Iterable[int], Item]] = []
        ready = list(dict.fromkeys(ready))  # a join may add requests again that have just become ready
        for pending in ready:
            text = self.table.objection(pending) if self.table.holds(pending) else ""
            if text:
                items += self._fail(pending, "mismatch", text)
                self.replay_controller.disturbed()
        runnable: list[PendingRequest] = []
        taken: set[PendingRequest] = set()
        for pending in ready:
            if not self.table.holds(pending) or pending in taken:
                continue  # the request has just failed, or was taken together with its group
            known = None if self.table.joined else self.replay_controller.waiting_for(self.table.key(pending))
            if known is not None:
                items += self._decided(runnable)
                return items if self.replay_controller.replaying is not None else items + self._resume(known)
            mates = self.table.complete_group(pending)
            taken.update(mates)
            runnable += mates
        return items + self._decided(runnable)

    def _decided(self, runnable: Sequence[PendingRequest]) -> list[tuple[Iterable[int], Item]]:
        """Arrange ``runnable`` in buckets. Change to replay if these tensors complete a proven period.

        A period is a sequence of tensors that repeats in every step. It is proven if it has repeated often enough, see
        ``PeriodDetector``. Return the items that must be sent, each with the ranks that must get it.
        """
        items: list[tuple[Iterable[int], Item]] = []
        rest = list(runnable)
        while rest:
            buckets = self._arrange(rest)
            count, known = self._observe(rest, buckets)
            for bucket in buckets if count == len(rest) else self._arrange(rest[:count]):
                if self.table.holds(bucket[0]):  # not if an earlier bucket has removed its process set
                    items += self._start(bucket)
            if known is not None:
                return items + self._resume(known)  # ranks put the rest, of the next period, into the schedule
            rest = rest[count:]
        return items

    def _observe(
        self, runnable: Sequence[PendingRequest], buckets: Sequence[Sequence[PendingRequest]]
    ) -> tuple[int, KnownSchedule | None]:
        """Look for the end of a proven period (see ``_decided``) among ``runnable``.

        Return the number of tensors of ``runnable`` up to the end of the period, and the schedule of the period. If no
        proven period ends among these tensors, return the number of all tensors and None. ``buckets`` are the buckets
        into which ``runnable`` was arranged.
        """
        if self.table.joined:
            self.replay_controller.touched(self.table.key(pending) for pending in runnable)
            return len(runnable), None
        numbers = {pending: self._next_index + i for i, bucket in enumerate(buckets) for pending in bucket}
        tensors = [(self.table.key(pending), numbers[pending], pending.stamp) for pending in runnable]
        return self.replay_controller.decided(tensors, lambda i: not self.table.are_mates(runnable[i], runnable[i + 1]))

    def _start(self, bucket: Sequence[PendingRequest]) -> list[tuple[Iterable[int], Item]]:
        for pending in bucket:
            self.table.take(pending)
        spec = self.table.spec_of(bucket[0])
        if spec.kind is Kind.REMOVE_SET and spec.ranks is not None and spec.ranks[0] not in self.sets:
            text = f"process set {spec.ranks[0]} is not there (any more)"
            return [(bucket[0].ranks(), Failure(0, (bucket[0].name,), "mismatch", text))]
        return [self._run(bucket), *self._orphans(bucket[0])]

    def _fail(
        self, pending: PendingRequest, error: str, text: str, gone: tuple[int, ...] = ()
    ) -> list[tuple[Iterable[int], Item]]:
        """Return the failures of ``pending`` and all other tensors of its grouped call, and remove their requests.

        Each failure is for the ranks that requested the tensor. ``error`` is "mismatch" or "lost", and ``text`` is the
        error message. For "lost", ``gone`` are the ranks that have left.
        """
        specs = [self.table.spec(ask.spec) for ask in pending.different_asks()] if error == "mismatch" else []
        kinds = tuple(sorted({spec.kind.name.lower() for spec in specs}))
        parts = tuple(sorted({spec.part_of for spec in specs}))
        doomed = self.table.doom(pending)
        return [(one.ranks(), Failure(one.set_id, (one.name,), error, text, gone, kinds, parts)) for one in doomed]

    def _orphans(self, removal: PendingRequest) -> list[tuple[Iterable[int], Item]]:
        """Return the failures of all requests in the process set that ``removal`` has just removed.

        Each failure is for the ranks that sent the request. If ``removal`` is not the removal of a process set, return
        an empty list.
        """
        spec = self.table.spec_of(removal)
        if spec.kind is not Kind.REMOVE_SET or spec.ranks is None:
            return []
        items: list[tuple[Iterable[int], Item]] = []
        for pending in self.table.removed(spec.ranks[0]):
            where = describe([pending.name], pending.set_id)
            text = f"{where}: the process set was removed before all members had asked"
            items.append((pending.ranks(), Failure(pending.set_id, (pending.name,), "mismatch", text)))
        return items

    def _resume(self, known: KnownSchedule) -> list[tuple[Iterable[int], Item]]:
        """Return the items that make all ranks replay the schedule ``known`` from now on.

        All pending requests are forgotten here. The ranks put their pending tensors into the slots of the schedule, or
        request them again.
        """
        self._clear()
        items: list[tuple[Iterable[int], Item]] = []
        periods = 0
        if self.tuning.tunes(known):
            used = frozenset(rank for planned in known.arranged.buckets for rank in self.sets[planned.set_id])
            aligned = known.align()
            periods, adjust = self.tuning.begin(aligned, used)
            items += [(self._present, one) for one in adjust]
            if aligned:
                layout = self.tuning.layout
                self.params["fusion_bytes"] = float(layout["fusion_bytes"])
                self.replay_controller.compression = str(layout["compression"])
                self.replay_controller.lay_out_anew(known, _params(layout))
        if not known.told:
            known.told = True
            items.append((self._present, known.arranged))
        return [*items, (self._present, self.replay_controller.resume(known, self.epoch, periods))]

    def _next_trial(self, rank: int, message: Paused) -> Outgoing:
        """Handle the message Paused of ``rank``: the rank has reached the end of a trial of settings.

        If all ranks have paused, begin the next trial, perhaps with other buckets. Return the messages to send. All
        ranks have stopped at the same place, because a trial ends at the end of a period (a pass through the schedule).
        """
        known = self.replay_controller.replaying
        if known is None or self.replay_controller.freezing or not self.tuning.paused(rank, message):
            return []
        known.ended()
        return self._answers(self._resume(known), None, 0)

    def _clear(self) -> None:
        """Begin a new epoch, and forget all pending requests. The ranks will send these requests again."""
        self.epoch += 1
        self.table.clear()

    # --- beside and after replay

    def _beside_replay(
        self, ready: Sequence[PendingRequest], items: list[tuple[Iterable[int], Item]], rank: int, serial: int
    ) -> Outgoing:
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
                items += self._fail(pending, "mismatch", text)
            elif self.replay_controller.is_negotiated_slot(self.table.key(pending)) and not self.table.joined:
                self.table.take(pending)
                items.append(self._run([pending]))
            elif complete:
                insert = True
        return self._answers(items, rank, serial) + (self._freeze() if insert else [])

    def _freeze(self) -> Outgoing:
        if self.replay_controller.replaying is None or self.replay_controller.freezing:
            return []
        self.tuning.left()
        self.replay_controller.freeze()
        freeze = Freeze(self.epoch)
        return [(rank, freeze) for rank in self._present]

    def _drain(self) -> Outgoing:
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
        outgoing: Outgoing = []
        for ranks, told in _shared(items, self._present):
            one = Drain(drain.epoch, drain.highest, drain.lowest, told)
            outgoing += [(rank, one) for rank in ranks if rank not in self._left]  # a lost rank gets no message
        byes, self._byes = self._byes, []
        for rank, bye in byes:
            outgoing += self._bye(rank, bye)
        return outgoing

    def _arrange(self, runnable: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
        """Arrange ``runnable`` in buckets, and return the buckets in the order of their first tensors.

        The fusion policy decides which tensors of allreduces share a bucket. Each tensor of another operation gets a
        bucket of its own.
        """
        fusable = [i for i, p in enumerate(runnable) if self.table.spec_of(p).kind is Kind.ALLREDUCE]
        buckets = [[i] for i in sorted(set(range(len(runnable))).difference(fusable))]
        if fusable:
            described = [self.table.describe(runnable[i], self.replay_controller.compression) for i in fusable]
            for positions in self._policy.arrange(described, self.params):
                buckets.append([fusable[p] for p in positions])
        buckets.sort(key=lambda bucket: bucket[0])
        return [[runnable[i] for i in bucket] for bucket in buckets]

    def _run(self, bucket: Sequence[PendingRequest]) -> tuple[Iterable[int], Item]:
        spec = self.table.spec_of(bucket[0])
        members = self.sets[bucket[0].set_id]
        if spec.kind is Kind.ADD_SET:
            return self._add_set(bucket[0], spec)
        if spec.kind is Kind.REMOVE_SET:
            assert spec.ranks is not None
            del self.sets[spec.ranks[0]]
            self.replay_controller.removed(spec.ranks[0])
            return members, Bucket(self._take_index(), 0, spec.kind, (bucket[0].name,), result=spec.ranks[0])
        short = any(pending.asked != pending.members for pending in bucket)
        ragged = spec.kind.is_ragged
        # The coordinator resolves the setting for all ranks, as it does in a schedule: a search may change the setting,
        # and ranks that resolved it themselves could see the change at different buckets.
        by_setting = any(self.table.spec_of(pending).compressor == BY_SETTING for pending in bucket)
        return members, Bucket(
            self._take_index(),
            bucket[0].set_id,
            spec.kind,
            tuple(pending.name for pending in bucket),
            rows=tuple(self.table.rows(pending, members) for pending in bucket) if ragged else (),
            digests=tuple(self.table.digests(pending, members) for pending in bucket) if ragged else (),
            specs=tuple(pending.spec for pending in bucket) if short else (),
            compressor=spec.compressor_by(self.replay_controller.compression) if by_setting else "",
            contributors=bucket[0].asked.bit_count() if short and not self._divides_by_size else 0,
        )

    def _add_set(self, pending: PendingRequest, spec: Spec) -> tuple[Iterable[int], Item]:
        assert spec.ranks is not None
        set_id, self._next_set = self._next_set, self._next_set + 1
        self.sets[set_id] = spec.ranks
        return self.sets[0], Bucket(self._take_index(), 0, Kind.ADD_SET, (pending.name,), result=set_id)

    # --- leaving

    def _bye(self, rank: int, bye: Bye) -> Outgoing:
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
        items: list[tuple[Iterable[int], Item]] = []
        for pending in self.table.all():
            if rank in self.sets[pending.set_id]:
                failure = self._gone(pending.set_id, (pending.name,), [rank])
                items += self._fail(pending, "lost", failure.text, (rank,))
        for other, ask in self.table.joined.items():  # these ranks wait for a join that can never complete
            items.append(((other,), self._gone(0, (ask.name,), [rank])))
        self.table.none_joined()
        return [*self._answers(items, None, 0), (rank, Farewell())]

    def _gone(self, set_id: int, names: tuple[str, ...], gone: Sequence[int]) -> Failure:
        return Failure(set_id, names, "lost", self._left[gone[0]], tuple(gone))

    # --- helpers

    def _answers(self, items: Sequence[tuple[Iterable[int], Item]], asker: int | None, serial: int) -> Outgoing:
        """Return one message for each rank that must get at least one of ``items``.

        ``asker`` is the rank whose request is answered, or None. The asker always gets a message, because it waits for
        an answer. ``serial`` is the number of the asker's request.
        """
        outgoing: Outgoing = []
        for ranks, told in _shared(items, () if asker is None else (asker,)):
            answer = Answer(self.epoch, 0, told)
            for rank in ranks:
                if rank == asker:
                    outgoing.append((rank, Answer(self.epoch, serial, told)))
                elif rank not in self._left:
                    outgoing.append((rank, answer))
        return outgoing

    def _take_index(self) -> int:
        self._next_index += 1
        return self._next_index - 1


def _awaited(pending: PendingRequest, table: RequestTable) -> Awaited:
    """Return a description of the wait for a tensor that some members have not requested."""

    def details() -> Details:
        missing = tuple(table.missing(pending))
        return Details(missing, (Late(pending.name, pending.set_id, tuple(pending.ranks()), missing, 0.0),))

    return Awaited(pending, "in discovery", "for a sign of life", details)


def _params(layout: Mapping[str, Value]) -> dict[str, float]:
    """Return the settings with which the fusion policy arranges the buckets of a whole period: numbers by name."""
    numbers = {name: float(value) for name, value in layout.items() if not isinstance(value, str)}
    return {**numbers, "overlap": float(layout["overlap"] == "on")}


def _shared(
    items: Iterable[tuple[Iterable[int], Item]], always: Iterable[int]
) -> list[tuple[list[int], tuple[Item, ...]]]:
    """Return pairs (ranks, items to send to these ranks). The order of the items is kept.

    Ranks that get the same items are in one pair. The ranks in ``always`` are included even if there is no item for
    them.
    """
    runs = [list(run) for _, run in groupby(items, key=lambda pair: id(pair[0]))]  # often just one run, for all ranks
    heard: dict[int, tuple[int, ...]] = dict.fromkeys(always, ())
    for number, run in enumerate(runs):
        for rank in run[0][0]:
            heard[rank] = (*heard.get(rank, ()), number)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in heard.items():
        ranks.setdefault(numbers, []).append(rank)
    return [(same, tuple(item for n in numbers for _, item in runs[n])) for numbers, same in ranks.items()]
