"""A period laid out as a schedule, and one rank's way through it: what may be launched, and what was.

Pure: no thread, no lock, no clock. The caller holds its lock; see docs/design for why leaving is safe.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, Generic, TypeVar, cast

import msgspec

from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.messages import BY_SETTING, Arranged, Bucket, Planned, Spec, encode
from ddlcore.runtime.devices import ON_HOST
from ddlcore.runtime.periods import Occurrence, segments
from ddlcore.types import CPU, Kind

__all__ = ["MOST_KNOWN", "Launch", "Offer", "Position", "Replay", "Schedule", "arrange"]

# Schedules that the coordinator, and so every rank, remembers: the last so many to be resumed. A rank forgets none
# that the coordinator may still resume without telling it anew, since both see the same row of Resumes.
MOST_KNOWN = 16

UNDIVIDED_BYTES = float(256 << 20)
_FOR_EVER = 1 << 62
_NOTHING = Planned(0, Kind.BARRIER, (), ())

T = TypeVar("T")
_NEVER = frozenset({Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET})


def arrange(
    number: int,
    period: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
    compression: str = "none",
) -> Arranged | None:
    """The schedule of ``period``, which is in ready order; None for a period that cannot be replayed.

    ``compression``: the compressor of what leaves that to the setting, see ``Spec.compressor_by``.

    Tensors that depend on each other never share a bucket: y comes after x, in another bucket, where
    some rank had seen x end before it asked for y.
    """
    if any(spec_of(one.key.spec).kind in _NEVER for one in period):
        return None
    planned = tuple(
        _compressed(bucket, spec_of, compression)
        for segment in segments(period)
        for bucket in _committed(_lay_out(segment, spec_of, policy, params, compression), spec_of)
    )
    digest = hashlib.blake2b(encode(Arranged(number, b"", planned)), digest_size=16).digest()
    return Arranged(number, digest, planned)


def _lay_out(
    segment: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
    compression: str,
) -> list[Planned]:
    """Buckets of tensors that do not depend on each other, by their first tensor's place in ready order."""
    specs = [spec_of(one.key.spec) for one in segment]
    fusable = [i for i, spec in enumerate(specs) if spec.kind is Kind.ALLREDUCE]
    groups = [[i] for i, spec in enumerate(specs) if spec.kind is not Kind.ALLREDUCE]
    late = [i for i in fusable if specs[i].device == CPU.kind] if not params.get("overlap", 1.0) else []
    early = [i for i in fusable if i not in set(late)]
    for chosen, given in ((early, params), (late, _undivided(params))):
        ready = [_ready(segment[i], specs[i], compression) for i in chosen]
        groups += [[chosen[p] for p in positions] for positions in policy.arrange(ready, given)]
    groups.sort(key=max)  # a bucket cannot start before its last tensor is ready
    return [
        Planned(
            segment[group[0]].key.set_id,
            specs[group[0]].kind,
            tuple(segment[i].key.name for i in group),
            tuple(segment[i].key.spec for i in group),
            specs[group[0]].kind.is_ragged,
        )
        for group in groups
    ]


def _committed(buckets: list[Planned], spec_of: Callable[[bytes], Spec]) -> list[Planned]:
    """The buckets of one segment. The last of each set on devices is marked: what the user does next may depend on it.

    What somebody has had staged on the host is not on them: no message follows it, and those before it would have none.
    """
    places = [spec_of(one.specs[0]).device for one in buckets]
    on_devices = [place != CPU.kind and not place.endswith(ON_HOST) for place in places]
    last = {one.set_id: i for i, (one, on_device) in enumerate(zip(buckets, on_devices)) if on_device}
    for i in last.values():
        buckets[i] = msgspec.structs.replace(buckets[i], commit=True)
    return buckets


def _compressed(planned: Planned, spec_of: Callable[[bytes], Spec], compression: str) -> Planned:
    if not any(spec_of(spec).compressor == BY_SETTING for spec in planned.specs):
        return planned
    return msgspec.structs.replace(planned, compressor=spec_of(planned.specs[0]).compressor_by(compression))


def _undivided(params: Mapping[str, float]) -> dict[str, float]:
    """Of a period whose communication would take the computation's cores: nothing is gained by small buckets."""
    fusion_bytes = params["fusion_bytes"]
    return {**params, "fusion_bytes": fusion_bytes and max(fusion_bytes, UNDIVIDED_BYTES), "first_bucket_bytes": 0.0}


def _ready(one: Occurrence, spec: Spec, compression: str) -> Ready:
    compressor = spec.compressor_by(compression)
    key = (one.key.set_id, spec.dtype, spec.op, spec.prescale, spec.postscale, spec.device, compressor)
    group = f"{one.key.set_id}.{one.key.name.rpartition('[')[0]}" if spec.group and one.key.name else None
    return Ready(one.key.name, key, prod(spec.shape) * spec.dtype.itemsize, group=group)


class Schedule:
    """What a rank needs of an Arranged message, computed once."""

    def __init__(self, arranged: Arranged, sets: Mapping[int, Sequence[int]], rank: int) -> None:
        self.number = arranged.schedule
        self.digest = arranged.digest
        self.buckets = arranged.buckets
        self.mine = [rank in sets[planned.set_id] for planned in arranged.buckets]
        self.named: dict[tuple[int, str], tuple[int, int, bytes]] = {}
        self.anonymous: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
        for position, planned in enumerate(arranged.buckets):
            for i, (name, spec) in enumerate(zip(planned.names, planned.specs)):
                if name:
                    self.named[planned.set_id, name] = (position, i, spec)
                else:
                    self.anonymous.setdefault((planned.set_id, spec), []).append((position, i))


class Offer(Enum):
    """What a schedule says of an entry."""

    TAKEN = 0  # it stands in its slot, or waits behind one that does
    ALIEN = 1  # no place for it: the coordinator is asked
    CONFLICT = 2  # its name has a place, for another spec: the schedule cannot go on


class Position(Generic[T]):
    """One bucket of a schedule on this rank: what stands in its slots, and what was found out about it once."""

    __slots__ = (
        "entries",
        "index",
        "mine",
        "missing",
        "missing_when_empty",
        "nbytes",
        "planned",
        "run",
        "set_id",
        "usual_s",
    )

    def __init__(self, index: int, planned: Planned, mine: bool) -> None:
        self.index = index
        self.planned = planned
        self.mine = mine
        self.run: Any = None  # the executor's: how to run it
        self.nbytes = 0  # known with ``run``
        self.usual_s: float | None = None  # how long its first entry waits for the launch; None: not known yet
        self.set_id = planned.set_id
        self.missing = self.missing_when_empty = len(planned.names)
        self.entries: list[T | None] = [None] * self.missing  # of what is launched: the launch's


@dataclass(slots=True, eq=False)  # one a bucket: a frozen one takes three times as long to make
class Launch(Generic[T]):
    """A bucket at its place; never changed. ``entries`` is None where this rank takes part with dummy memory.

    A ragged slot is drained with the real entries: its sizes were agreed upon, and all of it is void anyway.
    """

    place: int
    position: Position[T]
    entries: Sequence[T] | None
    bucket: Bucket | None = None  # of a ragged slot: what was negotiated for it
    number: int = -1  # the how-manieth launch of this rank, whatever the schedule

    @property
    def planned(self) -> Planned:
        return self.position.planned


class Replay(Generic[T]):
    """One rank's way through a schedule, from a Resume to the Drain that ends it. ``T`` is an entry."""

    def __init__(self, schedule: Schedule, start: int, after: Mapping[int, int], until: int = -1) -> None:
        """``until``: see Resume; with it, ``turned`` becomes True whenever a period ends."""
        self.schedule = schedule
        self.frozen = False
        self.current: Position[T]  # of the next bucket
        self.turned = False  # a period has ended; who reads it sets it back
        self.paused = False  # nothing is launched any more: what comes next is at ``until`` or beyond
        self._until = until if until >= 0 else _FOR_EVER
        self.turn_at = _FOR_EVER
        self.launched: dict[int, int] = {planned.set_id: after.get(planned.set_id, -1) for planned in schedule.buckets}
        self.positions: list[Position[T]] = [
            Position(i, planned, mine) for i, (planned, mine) in enumerate(zip(schedule.buckets, schedule.mine))
        ]
        self.filled = 0  # entries that stand in slots
        self._after = dict(after)
        self._idle = not any(schedule.mine)
        self.next = self._start = start  # the next place
        self._ragged_slots: dict[int, deque[tuple[Bucket, tuple[T, ...]]]] = {}
        self._queues: dict[tuple[int, bytes], deque[T]] = {}  # anonymous calls that wait for a slot
        self._turn: dict[tuple[int, bytes], int] = {}  # anonymous calls: how many were offered
        self.next, self.current, self.paused = self._from(start)
        self.turned = False
        if until >= 0:
            self.turn_at = self._period_end(self.next)
        for key, places in schedule.anonymous.items():  # calls of the period that had run before ``start``
            done = sum(1 for position, _ in places if self._is_behind(position))
            self._turn[key] = done

    def slot(self, set_id: int, name: str, spec: bytes) -> tuple[Position[T], int] | None:
        """Where the named tensor stands in every period: its bucket and slot. None if the schedule has none for it."""
        found = self.schedule.named.get((set_id, name))
        if found is None or found[2] != spec or self.schedule.buckets[found[0]].ragged:
            return None
        return self.positions[found[0]], found[1]

    def offer(self, set_id: int, name: str, anonymous: bool, spec: bytes, entry: T) -> Offer:
        """Takes an entry into its slot, if the schedule has one for it."""
        if anonymous:
            places = self.schedule.anonymous.get((set_id, spec))
            if not places or self.schedule.buckets[places[0][0]].ragged:
                return Offer.ALIEN
            self._queues.setdefault((set_id, spec), deque()).append(entry)
            self._refill(set_id, spec)
            return Offer.TAKEN
        found = self.schedule.named.get((set_id, name))
        if found is None:
            return Offer.ALIEN
        if found[2] != spec:
            return Offer.CONFLICT
        if self.schedule.buckets[found[0]].ragged:
            return Offer.ALIEN
        self.put(self.positions[found[0]], found[1], entry)
        return Offer.TAKEN

    def _refill(self, set_id: int, spec: bytes) -> None:
        """Anonymous calls take the slots of their spec in turn; what is beyond a period waits for the next."""
        queue = self._queues.get((set_id, spec))
        places = self.schedule.anonymous[set_id, spec]
        while queue:
            index, i = places[self._turn[set_id, spec] % len(places)]
            position = self.positions[index]
            if position.entries[i] is not None:
                return
            # No call but the last one, see TensorQueue: in its slot and out of the queue, or neither.
            position.entries[i] = queue[0]
            position.missing -= 1
            self.filled += 1
            self._turn[set_id, spec] += 1
            queue.popleft()

    def refill(self) -> None:
        """Anonymous calls that wait take the slots that a launch has left."""
        for key, queue in self._queues.items():
            if queue:
                self._refill(*key)

    @property
    def queued(self) -> bool:
        """Whether a launch may leave slots for anonymous calls that wait, see ``refill``."""
        return bool(self._queues) and any(self._queues.values())

    def holds(self, entry: T) -> bool:
        """Whether it was taken, and not launched."""
        return any(entry is one for position in self.positions for one in position.entries) or any(
            entry is one for queue in self._queues.values() for one in queue
        )

    def put(self, position: Position[T], i: int, entry: T) -> None:
        """Into a slot that is free. This is all that a persistent request costs here."""
        position.entries[i] = entry
        position.missing -= 1
        self.filled += 1

    def fill(self, bucket: Bucket, entries: Sequence[T], anonymous: bool, spec: bytes) -> bool:
        """A ragged slot has been negotiated. False if ``bucket`` belongs to no ragged slot of this schedule."""
        if anonymous:
            places = [position for position, _ in self.schedule.anonymous.get((bucket.set_id, spec), ())]
        else:
            found = self.schedule.named.get((bucket.set_id, bucket.names[0]))
            places = [found[0]] if found is not None else []
        ragged_slots = [position for position in places if self.schedule.buckets[position].ragged]
        if not ragged_slots:
            return False
        # The first that has the fewest waiting: negotiation may run a period ahead of launching.
        size = len(self.positions)
        ahead = sorted(
            ragged_slots, key=lambda place: (len(self._ragged_slots.get(place, ())), (place - self.next) % size)
        )
        self._ragged_slots.setdefault(ahead[0], deque()).append((bucket, tuple(entries)))
        return True

    @property
    def place(self) -> int:
        """Of the next bucket."""
        return self.next

    @property
    def periods(self) -> int:
        """How many have come to their end since the Resume."""
        size = len(self.positions)
        return self.next // size - self._start // size

    @property
    def filled_ragged_slots(self) -> bool:
        """Whether a filled ragged slot stands unlaunched."""
        return bool(self._ragged_slots) and any(self._ragged_slots.values())

    def waits(self) -> bool:
        """Whether an entry stands in a slot, or a filled ragged slot, unlaunched."""
        return self.filled > 0 or any(self._ragged_slots.values())

    def ready(self) -> bool:
        """Whether ``launch`` has something to give."""
        if self.frozen:
            return False
        return self.current.missing == 0 or bool(self._ragged_slots and self._ragged_slots.get(self.current.index))

    def launch(self, number: int = -1) -> Launch[T]:
        """The next bucket in order; only if ``ready``. It counts as launched from here on."""
        launch, fresh, self.next, self.current, self.paused, turn_at = self.step(number)
        position = launch.position
        if fresh:
            self.filled -= position.missing_when_empty
            position.entries = fresh
            position.missing = position.missing_when_empty
        self.launched[position.set_id] = launch.place
        if turn_at >= 0:
            self.turned = True
            self.turn_at = turn_at
        if launch.bucket is not None:
            self.take_ragged_slot(position)
        self.refill()
        return launch

    def step(
        self, number: int, alone: T | None = None
    ) -> tuple[Launch[T], list[T | None], int, Position[T], bool, int]:
        """What ``launch`` would do, before anything has changed; ``TensorQueue`` does it, among other things of one moment.

        The launch; its position's slots behind it, none where they stay as they are; the next place, its position, and
        whether it is a pause; where the next period ends if one has ended, else -1. ``alone``: the one entry of a bucket
        whose only slot is still empty.
        """
        position = self.current
        place = self.next
        bucket: Bucket | None = None
        entries: Sequence[T]
        fresh: list[T | None] = []
        if alone is not None:
            entries = [alone]
        elif position.planned.ragged:
            bucket, entries = self._ragged_slots[position.index][0]
        else:
            entries = cast("list[T]", position.entries)  # all are there
            fresh = [None] * len(entries)
        launch = Launch(place, position, entries, bucket, number)
        following, current, paused = self._from(place + 1)
        turn_at = self._period_end(following) if following >= self.turn_at else -1
        return launch, fresh, following, current, paused, turn_at

    def take_ragged_slot(self, position: Position[T]) -> None:
        """What was negotiated for it is launched."""
        self._ragged_slots[position.index].popleft()

    def freeze(self) -> tuple[tuple[int, int], ...]:
        """No launch after this; for each process set the last place that was launched."""
        self.frozen = True
        return tuple(sorted(self.launched.items()))

    def drain(self, highest: Mapping[int, int]) -> list[Launch[T]]:
        """What this rank must still take part in, with dummy memory, in order."""
        dummies: list[Launch[T]] = []
        until = max(highest.values(), default=-1)
        while self.next <= until:
            position = self.current
            if position.mine and self.next <= highest[position.planned.set_id]:
                waiting = self._ragged_slots.get(position.index)
                bucket, entries = waiting.popleft() if waiting else (None, None)
                dummies.append(Launch(self.next, position, entries, bucket))
            self.next, self.current, self.paused = self._from(self.next + 1)
        return dummies

    def _is_behind(self, index: int) -> bool:
        """Whether this position of the present period has run already."""
        place = self.next - self.next % len(self.positions) + index
        return place < self.next or place <= self._after.get(self.positions[index].planned.set_id, -1)

    def _period_end(self, place: int) -> int:
        return (place // len(self.positions) + 1) * len(self.positions)

    def _from(self, place: int) -> tuple[int, Position[T], bool]:
        """The first bucket from ``place`` on that is this rank's own and has not run; whether that is a pause instead."""
        size = len(self.positions)
        while True:
            if place >= self._until:
                nothing: Position[T] = Position(-1, _NOTHING, False)  # never ready, so that no launch has to ask
                nothing.missing = 1
                return place, nothing, True
            current = self.positions[place % size]
            if current.mine and place > self._after.get(current.set_id, -1):
                return place, current, False
            if self._idle:
                return place, current, False  # nothing in it is this rank's own
            place += 1
