"""The coordinator's part of replay: decides which schedules are known, which schedule is replayed, and how replay ends.

This module is part of the coordinator's state machine, without I/O, thread or clock. The coordinator reports which
tensors it decided in negotiation, which ranks want to leave replay, and which buckets they have launched. The results
are messages to send. A period is the sequence of tensors that repeats in a training loop, or one pass through its
schedule. Places number the buckets of a schedule through all periods, see the message Resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_coordinator import Frozen
from ddlcore.messages.to_rank import Arranged, Drain, Planned, Resume
from ddlcore.runtime.arranging import arrange
from ddlcore.runtime.periods import Occurrence, PeriodDetector, TensorKey, segments
from ddlcore.runtime.repetitions import MOST_REPLAYED
from ddlcore.runtime.schedule import MOST_KNOWN

MOST_SUSPICIONS = 2  # in succession: each comes after a second or more, and no bucket runs in between
CONSECUTIVE = 2  # a tensor that was inserted in so many consecutive periods belongs to the period


def tensor_key(set_id: int, name: str, spec: bytes) -> TensorKey:
    """Return the key by which a tensor is recognized in the next step.

    If the call had no name, the name in the key is "", and the tensor is recognized by its spec.
    """
    return TensorKey(set_id, "" if name.startswith("noname.") else name, spec)


@dataclass(eq=False)
class KnownSchedule:
    """A schedule that the ranks can replay, and the places up to which it had run when the ranks last left it."""

    arranged: Arranged
    keys: frozenset[TensorKey]
    after: dict[int, int] = field(default_factory=dict)  # by process set: the last valid place
    told: bool = False  # whether it was sent to all ranks
    found: tuple[Occurrence, ...] = ()  # the period from which it was arranged
    whole: bool = True  # none of its tensors was negotiated since it was left, so replay can continue there
    suspicions: int = 0  # how often in succession it was left because no bucket ran for long
    inserted: dict[TensorKey, tuple[int, int]] = field(default_factory=dict)  # last period, how many in succession
    begun: int = 0  # the number of the period in which it was found, or found again
    until: int = -1  # the place at which all ranks stop by themselves; -1 for none

    @property
    def size(self) -> int:
        return len(self.arranged.buckets)

    def align(self) -> bool:
        """Return whether the schedule can continue at the beginning of the same period in all its process sets.

        If it can, set ``after`` for all process sets to the last place before that period.
        """
        last = {planned.set_id: i for i, planned in enumerate(self.arranged.buckets)}
        begin = self.fresh_start()
        if begin and any(self.after.get(set_id, -1) < begin - self.size + i for set_id, i in last.items()):
            return False
        self.after = dict.fromkeys(last, begin - 1)
        return True

    def ended(self) -> None:
        """Record that all ranks have run the schedule up to place ``until`` and have stopped there."""
        self.after = dict.fromkeys({planned.set_id for planned in self.arranged.buckets}, self.until - 1)

    @property
    def negotiated_slots(self) -> frozenset[TensorKey]:
        """Return the keys of those tensors of the schedule that are negotiated in each step."""
        return frozenset(
            TensorKey(planned.set_id, name, spec)
            for planned in self.arranged.buckets
            if planned.negotiated
            for name, spec in zip(planned.names, planned.specs)
        )

    @property
    def period(self) -> int:
        """Return the number of the last period in which a bucket has run and is valid; -1 if there is none."""
        return max(self.after.values(), default=-1) // self.size

    def fresh_start(self) -> int:
        """Return the first place of the period after ``period``: in that period no bucket has run yet."""
        return (self.period + 1) * self.size


class ReplayController:
    """The part of the coordinator that decides when the ranks change from negotiation to replay and back.

    If ``enabled`` is False, the ranks never replay a schedule.
    """

    def __init__(
        self, policy: FusionPolicy, params: Mapping[str, float], spec_of: Callable[[bytes], Spec], enabled: bool
    ) -> None:
        self.enabled = enabled
        self.replaying: KnownSchedule | None = None
        self.divergences = 0
        self.compression = "none"  # see ``arrange``
        self._policy = policy
        self._params = params
        self._spec_of = spec_of
        self._detector = PeriodDetector()
        self._known: list[KnownSchedule] = []  # in the order in which they were last resumed or arranged
        self._arranged = 0  # how many schedules have been arranged
        self._frozen: dict[WorldRank, dict[int, int]] | None = None  # last places; None: no freeze is under way
        self._resumed_after: dict[int, int] = {}

    # --- discovery

    def decided(
        self, tensors: Sequence[tuple[TensorKey, int, int]], may_end: Callable[[int], bool]
    ) -> tuple[int, KnownSchedule | None]:
        """Look for a period that ends among ``tensors``, which are about to be decided in negotiation.

        ``tensors`` are in the order in which they became ready. Each item is (key, index of its bucket, highest
        ``stamp`` of its Asks). ``may_end(i)`` returns whether a period may end between tensor ``i`` and the next
        tensor. Return the number of tensors up to the end of the period, and the schedule to replay after them. If no
        period ends among ``tensors``, return the number of all tensors and None.
        """
        for i, (key, bucket, stamp) in enumerate(tensors):
            self.touched([key])
            period = self._detector.observe(Occurrence(key, bucket, stamp)) if self.enabled else None
            if period is not None and (i + 1 == len(tensors) or may_end(i)):
                known = self._schedule(period)
                if known is not None:
                    return i + 1, known
        return len(tensors), None

    def touched(self, keys: Iterable[TensorKey]) -> None:
        """Record that the tensors with these ``keys`` were negotiated.

        A schedule that contains one of these tensors can no longer continue at the place where it was left.
        """
        for key in keys:
            for known in self._known:
                known.whole = known.whole and key not in known.keys

    def disturbed(self) -> None:
        """Forget all observations about periods.

        This is called at a failure, a join and a change of the process sets, because no period may contain one of these
        events.
        """
        self._detector.reset()

    def removed(self, set_id: int) -> None:
        """Forget every schedule that contains buckets of the process set ``set_id``, which has been removed."""
        self._forget({set_id})

    def parted(self, rank: WorldRank, sets: Mapping[int, Sequence[WorldRank]]) -> None:
        """Forget every schedule that needs ``rank``, which has left."""
        self._forget({set_id for set_id, members in sets.items() if rank in members})

    def _forget(self, set_ids: set[int]) -> None:
        self.disturbed()
        for known in self._known:
            if any(planned.set_id in set_ids for planned in known.arranged.buckets):
                known.whole = False
        self._known = [k for k in self._known if all(p.set_id not in set_ids for p in k.arranged.buckets)]

    def waiting_for(self, key: TensorKey) -> KnownSchedule | None:
        """Return a known schedule that contains the tensor ``key`` and can continue at the place where it was left.

        This is called when all members have the tensor ready. Return None if there is no such schedule.
        """
        for known in self._known if not self._detector.collects else ():
            if known is not self.replaying and known.whole and key in known.keys:
                return known
        return None

    def _schedule(self, period: Sequence[Occurrence]) -> KnownSchedule | None:
        keys = sorted((one.key.set_id, one.key.name, one.key.spec) for one in period)
        for known in self._known:
            if keys == sorted(_keys(known.arranged.buckets)):
                turn = _turn(known.arranged.buckets, period)
                if turn is not None:
                    known.whole = True
                    known.inserted.clear()
                    known.begun = known.period + 1
                    known.after = dict.fromkeys((set_id for set_id, _, _ in keys), known.fresh_start() + turn - 1)
                    return known
        arranged = arrange(self._arranged, period, self._spec_of, self._policy, self._params, self.compression)
        if arranged is None:
            return None
        self._known = [known for known in self._known if keys != sorted(_keys(known.arranged.buckets))]
        self._arranged += 1
        self._known.append(KnownSchedule(arranged, frozenset(one.key for one in period), found=tuple(period)))
        del self._known[:-MOST_KNOWN]
        return self._known[-1]

    # --- replay

    def lay_out_anew(self, known: KnownSchedule, params: Mapping[str, float]) -> None:
        """Arrange the tensors of the schedule ``known`` in buckets anew, with the settings ``params``.

        The schedule must continue at the beginning of a period, see ``KnownSchedule.align``. The schedule keeps its
        number and the count of its periods.
        """
        self._params = params
        number = known.arranged.schedule
        arranged = arrange(number, known.found, self._spec_of, self._policy, params, self.compression)
        assert arranged is not None  # these tensors could be arranged before, so they can be now
        begun = known.fresh_start() // known.size
        if arranged.digest == known.arranged.digest:
            return
        known.arranged, known.told = arranged, False
        sets = {planned.set_id for planned in arranged.buckets}
        known.after = dict.fromkeys(sets, begun * known.size - 1)

    def resume(self, known: KnownSchedule, epoch: int, periods: int = 0) -> Resume:
        """Return the message that makes all ranks replay the schedule ``known`` from now on.

        ``periods`` is the number of periods after which the ranks must stop; 0 means no limit. If a period has already
        begun, the rest of it counts as one period.
        """
        self.replaying = known
        self._known = [*(other for other in self._known if other is not known), known]
        self._resumed_after = dict(known.after)
        self._detector.pause()
        places = {planned.set_id: known.after.get(planned.set_id, -1) for planned in known.arranged.buckets}
        start = min(places.values()) + 1
        known.until = (start // known.size + periods) * known.size if periods else -1
        return Resume(epoch, known.arranged.schedule, start, tuple(sorted(known.after.items())), known.until)

    def is_negotiated_slot(self, key: TensorKey) -> bool:
        """Return whether the tensor ``key`` belongs to a negotiated slot of the schedule that is replayed now."""
        return self.replaying is not None and key in self.replaying.negotiated_slots

    # --- leaving

    @property
    def freezing(self) -> bool:
        return self._frozen is not None

    @property
    def answered(self) -> Mapping[WorldRank, Mapping[int, int]]:
        """Return, for each rank that has answered Freeze, the last place that it launched in each process set."""
        return self._frozen or {}

    def freeze(self) -> None:
        """Record that the message Freeze has been sent to all ranks. ``frozen`` then records the answers."""
        self._frozen = {}

    def frozen(self, rank: WorldRank, message: Frozen, awaited: Collection[WorldRank]) -> bool:
        """Record that ``rank`` has stopped launching. Return whether all ranks in ``awaited`` have stopped."""
        if self._frozen is None:
            return False
        self._frozen.setdefault(rank, dict(message.launched))
        return len(self._frozen) >= len(awaited) and all(one in self._frozen for one in awaited)

    def drain(self, epoch: int, sets: Mapping[int, Sequence[WorldRank]]) -> Drain:
        """Return the message that says which buckets the ranks must still run, and which buckets are valid.

        Call this only after all ranks have answered Freeze. When these buckets have run, the ranks have left the
        schedule. ``sets`` contains the ranks of each process set.
        """
        assert self._frozen is not None
        assert self.replaying is not None
        # A bucket is valid only if every member launched it with real data. Each rank launches in the schedule's order,
        # so the valid ones are up to the smallest of the members' last places. Up to the largest of these places, some
        # member already waits in the collective, so all others must still enter it.
        used = {planned.set_id for planned in self.replaying.arranged.buckets}
        places = {
            set_id: [self._frozen[rank].get(set_id, -1) for rank in sets[set_id] if rank in self._frozen]
            for set_id in sorted(used)
        }
        self.replaying.after = {set_id: min(own, default=-1) for set_id, own in places.items()}
        highest = tuple((set_id, max(own, default=-1)) for set_id, own in places.items())
        self._frozen = None
        return Drain(epoch, highest, tuple(sorted(self.replaying.after.items())))

    def left(self, diverged: bool, inserted: Sequence[TensorKey], slow: bool = False) -> KnownSchedule | None:
        """Record that replay was left. Return the schedule that is replayed next; None if the ranks must negotiate.

        ``diverged`` says that some rank has submitted tensors that do not fit the schedule. ``inserted`` are the
        tensors for which replay was interrupted. ``slow`` says that some rank has waited for the other ranks for long.
        Perhaps the other ranks were only slow, for example because they wrote a checkpoint. So if ``slow`` is true, the
        schedule is kept, and continues as soon as all ranks have one of its tensors ready. But if this happens several
        times and no bucket runs in between, the schedule is treated as one that does not fit.
        """
        known, self.replaying = self.replaying, None
        assert known is not None
        progress = any(place > self._resumed_after.get(set_id, -1) for set_id, place in known.after.items())
        known.suspicions = (0 if progress else known.suspicions) + slow
        keys = [key for planned in known.arranged.buckets for key in _planned_keys(planned)]
        nameless = not any(key.name for key in keys)
        if slow or not nameless:
            self._detector.interrupted()
        else:
            self._detector.replayed(self._replayed(known))
        if diverged or known.suspicions > MOST_SUSPICIONS:
            self.divergences += 1
            known.whole = False
            self._detector.divergence(known.period - known.begun, keys)
            return None
        if slow:
            return None
        habitual = [self._insert(known, key, known.period) >= CONSECUTIVE for key in inserted]
        if any(habitual):
            known.whole = False  # the period has grown, so it must be found anew
            known.inserted.clear()
            if not nameless:
                self._detector.reset()
        return known if progress and known.whole else None

    def _replayed(self, known: KnownSchedule) -> list[TensorKey]:
        """Return the keys of the tensors of ``known`` that were replayed since the last Resume, in the order of replay."""
        buckets = known.arranged.buckets
        places = range(min(self._resumed_after.values(), default=-1) + 1, max(known.after.values(), default=-1) + 1)
        replayed: list[TensorKey] = []
        for place in places[-MOST_REPLAYED - 1 :]:  # one more, so that the detector sees that there were more
            planned = buckets[place % known.size]
            if self._resumed_after.get(planned.set_id, -1) < place <= known.after.get(planned.set_id, -1):
                replayed += _planned_keys(planned)
        return replayed

    def _insert(self, known: KnownSchedule, key: TensorKey, period: int) -> int:
        last, run = known.inserted.get(key, (-2, 0))
        known.inserted = {other: seen for other, seen in known.inserted.items() if period - seen[0] <= 1}
        if period > last:  # otherwise the tensor repeats within one period: another loop has begun
            run = run + 1 if period == last + 1 else 1
        known.inserted[key] = (period, run)
        return run


def _turn(buckets: Sequence[Planned], period: Sequence[Occurrence]) -> int | None:
    """Return the index in ``buckets`` at which ``period`` can begin; None if there is none.

    Both contain the same tensors. A segment is a part of the period whose tensors do not depend on each other.
    ``buckets`` are read in a circle: from the index to the last bucket, and then from the first bucket to the index.
    ``period`` can begin at the index if two conditions hold: each bucket contains only tensors of one segment, and the
    buckets are in the order of the segments. The order within a segment may differ.
    """
    segments_of: dict[TensorKey, list[int]] = {}
    for number, segment in enumerate(segments(period)):
        for one in segment:
            segments_of.setdefault(one.key, []).append(number)
    turns = range(len(buckets))
    return next((turn for turn in turns if _follows([*buckets[turn:], *buckets[:turn]], segments_of)), None)


def _follows(buckets: Sequence[Planned], segments_of: Mapping[TensorKey, Sequence[int]]) -> bool:
    left = {key: iter(numbers) for key, numbers in segments_of.items()}
    reached = 0
    for planned in buckets:
        numbers = {next(left[key]) for key in _planned_keys(planned)}
        if len(numbers) > 1 or min(numbers) < reached:
            return False
        reached = min(numbers)
    return True


def _planned_keys(planned: Planned) -> list[TensorKey]:
    return [TensorKey(planned.set_id, name, spec) for name, spec in zip(planned.names, planned.specs)]


def _keys(buckets: Sequence[Planned]) -> list[tuple[int, str, bytes]]:
    return [(planned.set_id, name, spec) for planned in buckets for name, spec in zip(planned.names, planned.specs)]
