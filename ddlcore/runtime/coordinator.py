"""Decides what runs next: messages of one world's ranks in, buckets in one total order out.

A sans-I/O state machine: no socket, thread or clock of its own. It knows specs, never tensors.
Every rank sees the buckets of all its process sets in the same order, so that no two ranks can ever
run two collectives in opposite orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from msgspec import DecodeError

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.messages import (
    BY_SETTING,
    Adjust,
    Answer,
    Arranged,
    Ask,
    Bucket,
    Busy,
    Bye,
    Drain,
    Failure,
    Farewell,
    Freeze,
    FromCoordinator,
    Frozen,
    Leave,
    Lost,
    Paused,
    ReplayStatus,
    Request,
    Resume,
    Spec,
    Where,
)
from ddlcore.runtime.awaited import Awaited, Details
from ddlcore.runtime.checks import describe, flaw
from ddlcore.runtime.freezes import Freezes
from ddlcore.runtime.pending_request import PendingRequest
from ddlcore.runtime.replay_controller import KnownSchedule, ReplayController
from ddlcore.runtime.replay_status import Busies, ReplayStatuses
from ddlcore.runtime.request_table import RequestTable
from ddlcore.runtime.stall_table import Late
from ddlcore.runtime.tuning import SearchDriver, Tuning, Value
from ddlcore.types import Kind

__all__ = ["Coordinator"]

Item = Bucket | Failure | Arranged | Resume | Adjust
Outgoing = list[tuple[int, FromCoordinator]]


class Coordinator:
    """The coordinator of one world of ``size`` ranks."""

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
    ) -> None:
        """``compression``: what float32 allreduces travel as that leave it to the setting, see ``Spec.compressor_by``.

        ``driver`` looks for better settings meanwhile.
        """
        self.size = size
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.epoch = 0  # grows with each change between discovery and replay
        self.params: dict[str, float] = {"fusion_bytes": fusion_bytes}
        self._policy = policy
        self.table = RequestTable()
        self._left: dict[int, str] = {}  # ranks that said Bye, with their reason
        self._present = dict.fromkeys(range(size))  # the others, in order
        self._next_index = 0
        self._next_set = 1
        # what lays out a whole period
        whole = {**self.params, "first_bucket_bytes": float(first_bucket_bytes), "overlap": float(overlap)}
        self.replay_controller = ReplayController(policy, whole, self.table.spec, replay)
        self.replay_controller.compression = compression
        sizes: dict[str, Value] = {"fusion_bytes": fusion_bytes, "first_bucket_bytes": first_bucket_bytes}
        self.tuning = Tuning(driver, {**sizes, "overlap": "on" if overlap else "off", "compression": compression})
        self._byes: list[tuple[int, Bye]] = []  # said during replay; they count when it has been left
        self._diverged = False  # a rank cannot go on with the schedule
        self._slow = False  # a rank suspects so
        self._statuses = ReplayStatuses()
        self._busies = Busies()
        self._freezes = Freezes()

    # --- messages in, messages out

    def handle(self, rank: int, message: Request | Bye | Leave | Frozen | ReplayStatus | Busy | Paused) -> Outgoing:
        """What all ranks are to be told because ``rank`` said ``message``."""
        if isinstance(message, Bye):
            return self._bye(rank, message)
        if isinstance(message, Busy):
            self._busies.hear(rank, message)
            return []
        if message.epoch != self.epoch or rank in self._left:
            return []  # the rank resends what is pending when it enters the present epoch
        if isinstance(message, ReplayStatus):
            asked = self._statuses.hear(rank, message, self.sets.get(message.set_id, ()))
            return [(other, Where(self.epoch)) for other in asked if other not in self._left]
        if isinstance(message, Paused):
            return self._next_trial(rank, message)
        if isinstance(message, Frozen):
            return self._drain() if self.replay_controller.frozen(rank, message, self._present) else []
        if isinstance(message, Leave):
            self._freezes.leave(rank, message, self.epoch)
            # Who says so while another freeze is under way will say it again, if it still has to.
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
        """The process of ``rank`` ended with promises unkept: everybody is told, nothing more runs with it."""
        self._left[rank] = reason
        self._present.pop(rank, None)
        self.tuning.stop()
        lost = Lost((rank,), reason)
        return [(other, lost) for other in self._present]

    # --- what is waited for

    def parted(self, rank: int) -> bool:
        """Whether ``rank`` has left by itself, and has been told that nothing more comes."""
        return rank in self._left

    def awaited(self) -> list[Awaited]:
        """All that does not go on before some ranks have answered. Called now and then, by who watches over it."""
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
            if self.table.lacking(pending):  # what all have ready is held up by a freeze, or by the rest of its group
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
        """Where ``ask`` is to be counted; None where it is refused, or is a join."""
        members = self.sets.get(ask.set_id)
        if members is None or rank not in members:
            text = f"{describe([ask.name], ask.set_id)}: rank {rank} is not in such a process set (any more)"
            items.append(((rank,), Failure(ask.set_id, (ask.name,), "mismatch", text)))
            return None
        gone = [left for left in self._left if left in members]  # the first to leave is the cause
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
        """Checks what has become ready, and lays it out in buckets in the order in which it did."""
        items: list[tuple[Iterable[int], Item]] = []
        ready = list(dict.fromkeys(ready))  # a join may find again what has just become ready
        for pending in ready:
            text = self.table.objection(pending) if self.table.holds(pending) else ""
            if text:
                items += self._fail(pending, "mismatch", text)
                self.replay_controller.disturbed()
        runnable: list[PendingRequest] = []
        taken: set[PendingRequest] = set()
        for pending in ready:
            if not self.table.holds(pending) or pending in taken:
                continue  # failed, or found with its group, a moment ago
            known = None if self.table.joined else self.replay_controller.waiting_for(self.table.key(pending))
            if known is not None:
                items += self._decided(runnable)
                return items if self.replay_controller.replaying is not None else items + self._resume(known)
            mates = self.table.complete_group(pending)
            taken.update(mates)
            runnable += mates
        return items + self._decided(runnable)

    def _decided(self, runnable: Sequence[PendingRequest]) -> list[tuple[Iterable[int], Item]]:
        """Lays out what may run, and goes over to replay where that completes a period that is proven."""
        items: list[tuple[Iterable[int], Item]] = []
        rest = list(runnable)
        while rest:
            buckets = self._arrange(rest)
            count, known = self._observe(rest, buckets)
            for bucket in buckets if count == len(rest) else self._arrange(rest[:count]):
                if self.table.holds(bucket[0]):  # a set that was removed a moment ago has taken it with it
                    items += self._start(bucket)
            if known is not None:
                return items + self._resume(known)  # the rest is of the next period: it is offered to the schedule
            rest = rest[count:]
        return items

    def _observe(
        self, runnable: Sequence[PendingRequest], buckets: Sequence[Sequence[PendingRequest]]
    ) -> tuple[int, KnownSchedule | None]:
        """How many of ``runnable`` come before the end of a period that is proven by it, and its schedule."""
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
        """Ends ``pending``, and the rest of the grouped call it belongs to, on those who asked."""
        doomed = self.table.doom(pending)
        return [(one.ranks(), Failure(one.set_id, (one.name,), error, text, gone)) for one in doomed]

    def _orphans(self, removal: PendingRequest) -> list[tuple[Iterable[int], Item]]:
        """What waited in a process set that has just been removed fails on those who asked."""
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
        """Everybody replays ``known`` from now on; what is pending is offered to it, or asked for anew."""
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
        """All have come to the end of a trial, which is a period's: the next begins there, maybe in other buckets."""
        known = self.replay_controller.replaying
        if known is None or self.replay_controller.freezing or not self.tuning.paused(rank, message):
            return []
        known.ended()
        return self._answers(self._resume(known), None, 0)

    def _clear(self) -> None:
        """A new epoch: the ranks resend what is pending."""
        self.epoch += 1
        self.table.clear()

    # --- beside and after replay

    def _beside_replay(
        self, ready: Sequence[PendingRequest], items: list[tuple[Iterable[int], Item]], rank: int, serial: int
    ) -> Outgoing:
        """Ragged slots are filled; a tensor outside the schedule that all members have ready is inserted by one freeze."""
        insert = bool(self.table.joined)
        for pending in dict.fromkeys(ready):
            text = self.table.objection(pending)
            if self.table.is_torn(pending):
                self._diverged = insert = True
            elif text:
                items += self._fail(pending, "mismatch", text)
            elif self.replay_controller.is_ragged_slot(self.table.key(pending)) and not self.table.joined:
                self.table.take(pending)
                items.append(self._run([pending]))
            elif self.table.complete_group(pending):
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
        """Every rank has stopped launching: the decision, then what made them stop."""
        drain = self.replay_controller.drain(self.epoch, self.sets)
        diverged, slow, self._diverged, self._slow = self._diverged, self._slow, False, False
        # After a divergence all is asked for anew: what belongs together may have been torn apart.
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
            self.table.none_joined()  # they say so again, with all that is pending
        outgoing: Outgoing = []
        for ranks, told in _shared(items, self._present):
            one = Drain(drain.epoch, drain.highest, drain.lowest, told)
            outgoing += [(rank, one) for rank in ranks if rank not in self._left]  # who was lost is told nothing
        byes, self._byes = self._byes, []
        for rank, bye in byes:
            outgoing += self._bye(rank, bye)
        return outgoing

    def _arrange(self, runnable: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
        """Buckets in order of their first tensor; what the fusion policy may share comes from the policy."""
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
        # As in a schedule: the coordinator resolves the setting, which a search may change, for all ranks.
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
        for other, ask in self.table.joined.items():  # they wait for a join that cannot be; the leaver is told nothing
            items.append(((other,), self._gone(0, (ask.name,), [rank])))
        self.table.none_joined()
        return [*self._answers(items, None, 0), (rank, Farewell())]

    def _gone(self, set_id: int, names: tuple[str, ...], gone: Sequence[int]) -> Failure:
        return Failure(set_id, names, "lost", self._left[gone[0]], tuple(gone))

    # --- small things

    def _answers(self, items: Sequence[tuple[Iterable[int], Item]], asker: int | None, serial: int) -> Outgoing:
        """One message for each rank that is concerned; the asker gets one in any case: it acknowledges."""
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
    """Of a tensor that some members lack."""

    def details() -> Details:
        missing = tuple(table.missing(pending))
        return Details(missing, (Late(pending.name, pending.set_id, tuple(pending.ranks()), missing, 0.0),))

    return Awaited(pending, "in discovery", "for a sign of life", details)


def _params(layout: Mapping[str, Value]) -> dict[str, float]:
    """What the fusion policy is given for a whole period."""
    numbers = {name: float(value) for name, value in layout.items() if not isinstance(value, str)}
    return {**numbers, "overlap": float(layout["overlap"] == "on")}


def _shared(
    items: Iterable[tuple[Iterable[int], Item]], always: Iterable[int]
) -> list[tuple[list[int], tuple[Item, ...]]]:
    """What is told to whom, in order, each once with all ranks that are told the same. ``always`` are told something."""
    runs = [list(run) for _, run in groupby(items, key=lambda pair: id(pair[0]))]  # often one, to all ranks
    heard: dict[int, tuple[int, ...]] = dict.fromkeys(always, ())
    for number, run in enumerate(runs):
        for rank in run[0][0]:
            heard[rank] = (*heard.get(rank, ()), number)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in heard.items():
        ranks.setdefault(numbers, []).append(rank)
    return [(same, tuple(item for n in numbers for _, item in runs[n])) for numbers, same in ranks.items()]
