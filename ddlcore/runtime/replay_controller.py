"""The coordinator's half of replay: which schedules are known, which one runs, and how it is left.

Pure, and part of the coordinator's state machine: discovery tells it what was decided, ranks tell it
that they want to leave and how far they are; it answers with what to say to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.messages import Arranged, Drain, Frozen, Planned, Resume, Spec
from ddlcore.runtime.periods import Occurrence, PeriodDetector, TensorKey, segments
from ddlcore.runtime.schedule import MOST_KNOWN, arrange

__all__ = ["KnownSchedule", "ReplayController", "tensor_key"]

MOST_SUSPICIONS = 2  # in a row, a second or more each, without a bucket in between
CONSECUTIVE = 2  # a tensor that is inserted in so many periods in a row belongs to the period


def tensor_key(set_id: int, name: str, spec: bytes) -> TensorKey:
    """What the tensor is known by from step to step."""
    return TensorKey(set_id, "" if name.startswith("noname.") else name, spec)


@dataclass(eq=False)
class KnownSchedule:
    """A schedule that was arranged."""

    arranged: Arranged
    keys: frozenset[TensorKey]
    after: dict[int, int] = field(default_factory=dict)  # by set: the last place that is valid
    told: bool = False  # to all ranks
    found: tuple[Occurrence, ...] = ()  # what it was laid out from
    whole: bool = True  # no tensor of it was decided in discovery since: it can go on where it was left
    suspicions: int = 0  # how often in a row it was left since nothing moved
    inserted: dict[TensorKey, tuple[int, int]] = field(default_factory=dict)  # last period, how many in a row
    begun: int = 0  # the period in which it was learned, or learned again
    until: int = -1  # where all ranks stop by themselves

    @property
    def size(self) -> int:
        return len(self.arranged.buckets)

    def align(self) -> bool:
        """Whether it would go on at the begin of a period, in all its process sets, and nowhere in the middle."""
        last = {planned.set_id: i for i, planned in enumerate(self.arranged.buckets)}
        begin = self.fresh_start()
        if begin and any(self.after.get(set_id, -1) < begin - self.size + i for set_id, i in last.items()):
            return False
        self.after = dict.fromkeys(last, begin - 1)
        return True

    def ended(self) -> None:
        """All ranks have run it to ``until``, and stand there."""
        self.after = dict.fromkeys({planned.set_id for planned in self.arranged.buckets}, self.until - 1)

    @property
    def ragged_slots(self) -> frozenset[TensorKey]:
        """The tensors that are negotiated each time."""
        return frozenset(
            TensorKey(planned.set_id, name, spec)
            for planned in self.arranged.buckets
            if planned.ragged
            for name, spec in zip(planned.names, planned.specs)
        )

    @property
    def period(self) -> int:
        """The last of which something is valid, -1 before the first."""
        return max(self.after.values(), default=-1) // self.size

    def fresh_start(self) -> int:
        """The first place of a period that nobody has touched."""
        return (self.period + 1) * self.size


class ReplayController:
    """Between discovery and replay. ``enabled`` False stays in discovery for ever."""

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
        self._known: list[KnownSchedule] = []  # the last to be resumed or arranged at the end
        self._arranged = 0  # how many schedules there were
        self._frozen: dict[int, dict[int, int]] | None = None  # by rank: how far it is; None: no freeze under way
        self._resumed_after: dict[int, int] = {}

    # --- discovery

    def decided(
        self, tensors: Sequence[tuple[TensorKey, int, int]], may_end: Callable[[int], bool]
    ) -> tuple[int, KnownSchedule | None]:
        """What is about to be decided in discovery, in ready order: (tensor, its bucket, its newest stamp).

        Returns how many of them come before the end of a period that is proven by them, and the schedule
        to start there; all of them and None where there is none. ``may_end(i)``: whether one may end
        between a tensor and the next.
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
        """Tensors were decided outside replay: the schedules that hold them cannot go on where they were left."""
        for key in keys:
            for known in self._known:
                known.whole = known.whole and key not in known.keys

    def disturbed(self) -> None:
        """Something happened that no schedule may span: a failure, a join, a change of the sets."""
        self._detector.reset()

    def removed(self, set_id: int) -> None:
        """A process set is gone, and every schedule with it that needs it."""
        self._forget({set_id})

    def parted(self, rank: int, sets: Mapping[int, Sequence[int]]) -> None:
        """A rank has left, and every schedule with it that needs it."""
        self._forget({set_id for set_id, members in sets.items() if rank in members})

    def _forget(self, set_ids: set[int]) -> None:
        self.disturbed()
        for known in self._known:
            if any(planned.set_id in set_ids for planned in known.arranged.buckets):
                known.whole = False
        self._known = [k for k in self._known if all(p.set_id not in set_ids for p in k.arranged.buckets)]

    def waiting_for(self, key: TensorKey) -> KnownSchedule | None:
        """A known schedule that can go on with this tensor, which is ready everywhere."""
        for known in self._known:
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
        """``known``, at the begin of a period, in other buckets: it keeps its number and the count of its periods."""
        self._params = params
        number = known.arranged.schedule
        arranged = arrange(number, known.found, self._spec_of, self._policy, params, self.compression)
        assert arranged is not None  # it was laid out before
        begun = known.fresh_start() // known.size
        if arranged.digest == known.arranged.digest:
            return
        known.arranged, known.told = arranged, False
        sets = {planned.set_id for planned in arranged.buckets}
        known.after = dict.fromkeys(sets, begun * known.size - 1)

    def resume(self, known: KnownSchedule, epoch: int, periods: int = 0) -> Resume:
        """``known`` is replayed from now on; with ``periods``, that many, the present one included where it has begun."""
        self.replaying = known
        self._known = [*(other for other in self._known if other is not known), known]
        self._resumed_after = dict(known.after)
        self._detector.pause()
        places = {planned.set_id: known.after.get(planned.set_id, -1) for planned in known.arranged.buckets}
        start = min(places.values()) + 1
        known.until = (start // known.size + periods) * known.size if periods else -1
        return Resume(epoch, known.arranged.schedule, start, tuple(sorted(known.after.items())), known.until)

    def is_ragged_slot(self, key: TensorKey) -> bool:
        """Whether the schedule that runs leaves this tensor to negotiation, at its place."""
        return self.replaying is not None and key in self.replaying.ragged_slots

    # --- leaving

    @property
    def freezing(self) -> bool:
        return self._frozen is not None

    @property
    def answered(self) -> Mapping[int, Mapping[int, int]]:
        """By rank, the last place launched in each process set; of those that have answered Freeze."""
        return self._frozen or {}

    def freeze(self) -> None:
        """Freeze has been sent; see ``frozen``."""
        self._frozen = {}

    def frozen(self, rank: int, message: Frozen, awaited: Collection[int]) -> bool:
        """``rank`` has stopped launching. True when all of ``awaited`` have."""
        if self._frozen is None:
            return False
        self._frozen.setdefault(rank, dict(message.launched))
        return len(self._frozen) >= len(awaited) and all(one in self._frozen for one in awaited)

    def drain(self, epoch: int, sets: Mapping[int, Sequence[int]]) -> Drain:
        """All are frozen: what is run to its end, and what of it is valid. The schedule is left behind."""
        assert self._frozen is not None
        assert self.replaying is not None
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
        """After Drain: the schedule to go on with at once, or None for discovery.

        ``slow``: a rank has not heard of the others for long. If they just took their time (a checkpoint), the
        first tensor that all have resumes the schedule where it was. Where it comes no further than that for
        some times, it does not fit.
        """
        known, self.replaying = self.replaying, None
        assert known is not None
        progress = any(place > self._resumed_after.get(set_id, -1) for set_id, place in known.after.items())
        known.suspicions = (0 if progress else known.suspicions) + slow
        if diverged or known.suspicions > MOST_SUSPICIONS:
            self.divergences += 1
            known.whole = False
            self._detector.divergence(known.period - known.begun)
            return None
        if slow:
            return None
        habitual = [self._insert(known, key, known.period) >= CONSECUTIVE for key in inserted]
        if any(habitual):
            known.whole = False  # the period has grown: learn it anew
            known.inserted.clear()
            self._detector.reset()
        return known if progress and known.whole else None

    def _insert(self, known: KnownSchedule, key: TensorKey, period: int) -> int:
        last, run = known.inserted.get(key, (-2, 0))
        known.inserted = {other: seen for other, seen in known.inserted.items() if period - seen[0] <= 1}
        if period > last:  # else it repeats by itself: another loop has begun
            run = run + 1 if period == last + 1 else 1
        known.inserted[key] = (period, run)
        return run


def _turn(buckets: Sequence[Planned], period: Sequence[Occurrence]) -> int | None:
    """At which of ``buckets`` a period begins that has the same tensors; None if it does not fit between two of them.

    It fits where, from there on, the buckets follow the period's segments, each within one of them:
    the order within a segment may be another one each time.
    """
    rounds: dict[TensorKey, list[int]] = {}
    for number, segment in enumerate(segments(period)):
        for one in segment:
            rounds.setdefault(one.key, []).append(number)
    turns = range(len(buckets))
    return next((turn for turn in turns if _follows([*buckets[turn:], *buckets[:turn]], rounds)), None)


def _follows(buckets: Sequence[Planned], rounds: Mapping[TensorKey, Sequence[int]]) -> bool:
    left = {key: iter(numbers) for key, numbers in rounds.items()}
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
