"""A period laid out as a schedule, and one rank's way through it: what may be launched, and what was.

Pure: no thread, no lock, no clock. The caller holds its lock; see docs/design for why leaving is safe.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Generic, TypeVar

from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.messages import Arranged, Batch, Planned, Spec, encode
from ddlcore.runtime.periods import Occurrence, TensorKey
from ddlcore.types import Kind

__all__ = ["Launch", "Offer", "Replay", "Schedule", "arrange", "keeps_apart"]

T = TypeVar("T")
_NEVER = frozenset({Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET})


def arrange(
    number: int,
    period: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
) -> Arranged | None:
    """The schedule of ``period``, which is in ready order; None for a period that cannot be replayed.

    Tensors that depend on each other never share a batch: y comes after x, in another batch, where
    some rank had seen x end before it asked for y.
    """
    if any(spec_of(one.key.spec).kind in _NEVER for one in period):
        return None
    batches: list[Planned] = []
    segment: list[Occurrence] = []
    for one in period:
        if segment and one.stamp >= min(other.batch for other in segment):
            batches += _lay_out(segment, spec_of, policy, params)
            segment = []
        segment.append(one)
    batches += _lay_out(segment, spec_of, policy, params)
    planned = tuple(batches)
    digest = hashlib.blake2b(encode(Arranged(number, b"", planned)), digest_size=16).digest()
    return Arranged(number, digest, planned)


def keeps_apart(arranged: Arranged, period: Sequence[Occurrence]) -> bool:
    """Whether a schedule of the same tensors has all that ``period`` depends on in earlier batches."""
    places: dict[TensorKey, deque[int]] = {}
    for position, planned in enumerate(arranged.batches):
        for name, spec in zip(planned.names, planned.specs):
            places.setdefault(TensorKey(planned.set_id, name, spec), deque()).append(position)
    placed = [(places[one.key].popleft(), one) for one in period]
    ended: list[tuple[int, int]] = []  # (batch it ran in, the latest position of all that ran until then)
    for position, one in sorted(placed, key=lambda pair: pair[1].batch):
        ended.append((one.batch, max(position, ended[-1][1]) if ended else position))
    batches = [batch for batch, _ in ended]
    for position, one in placed:
        before = bisect_right(batches, one.stamp)
        if before and ended[before - 1][1] >= position:
            return False
    return True


def _lay_out(
    segment: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
) -> list[Planned]:
    """Batches of tensors that do not depend on each other, by their first tensor's place in ready order."""
    specs = [spec_of(one.key.spec) for one in segment]
    fusable = [i for i, spec in enumerate(specs) if spec.kind is Kind.ALLREDUCE]
    groups = [[i] for i, spec in enumerate(specs) if spec.kind is not Kind.ALLREDUCE]
    if fusable:
        ready = [_ready(segment[i], specs[i]) for i in fusable]
        groups += [[fusable[p] for p in positions] for positions in policy.arrange(ready, params)]
    groups.sort(key=lambda group: group[0])
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


def _ready(one: Occurrence, spec: Spec) -> Ready:
    key = (one.key.set_id, spec.dtype, spec.op, spec.prescale, spec.postscale, spec.device, spec.compressor)
    group = f"{one.key.set_id}.{one.key.name.rpartition('[')[0]}" if spec.group and one.key.name else None
    return Ready(one.key.name, key, prod(spec.shape) * spec.dtype.itemsize, group=group)


class Schedule:
    """What a rank needs of an Arranged message, computed once."""

    def __init__(self, arranged: Arranged, sets: Mapping[int, Sequence[int]], rank: int) -> None:
        self.number = arranged.schedule
        self.digest = arranged.digest
        self.batches = arranged.batches
        self.mine = [rank in sets[planned.set_id] for planned in arranged.batches]
        self.named: dict[tuple[int, str], tuple[int, int, bytes]] = {}
        self.anonymous: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
        for position, planned in enumerate(arranged.batches):
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


@dataclass(frozen=True, slots=True)
class Launch(Generic[T]):
    """A batch at its place. ``entries`` is None where this rank takes part with dummy memory.

    A hole is drained with the real entries: its sizes were agreed upon, and all of it is void anyway.
    """

    place: int
    planned: Planned
    entries: tuple[T, ...] | None
    batch: Batch | None = None  # of a hole: what was negotiated for it


class Replay(Generic[T]):
    """One rank's way through a schedule, from a Resume to the Drain that ends it. ``T`` is an entry."""

    def __init__(self, schedule: Schedule, start: int, after: Mapping[int, int]) -> None:
        self.schedule = schedule
        self.frozen = False
        self.launched: dict[int, int] = {planned.set_id: after.get(planned.set_id, -1) for planned in schedule.batches}
        self._after = dict(after)
        self._size = len(schedule.batches)
        self._next = start
        self._slots: list[list[T | None]] = [[None] * len(planned.names) for planned in schedule.batches]
        self._missing = [len(planned.names) for planned in schedule.batches]
        self._filled = 0  # entries that stand in slots
        self._holes: dict[int, deque[tuple[Batch, tuple[T, ...]]]] = {}
        self._queues: dict[tuple[int, bytes], deque[T]] = {}  # anonymous calls that wait for a slot
        self._turn: dict[tuple[int, bytes], int] = {}  # anonymous calls: how many were offered
        self._skip()
        for key, places in schedule.anonymous.items():  # calls of the period that had run before ``start``
            done = sum(1 for position, _ in places if self._is_behind(position))
            self._turn[key] = done

    def offer(self, set_id: int, name: str, anonymous: bool, spec: bytes, entry: T) -> Offer:
        """Takes an entry into its slot, if the schedule has one for it."""
        if anonymous:
            places = self.schedule.anonymous.get((set_id, spec))
            if not places or self.schedule.batches[places[0][0]].hole:
                return Offer.ALIEN
            self._queues.setdefault((set_id, spec), deque()).append(entry)
            self._refill(set_id, spec)
            return Offer.TAKEN
        found = self.schedule.named.get((set_id, name))
        if found is None:
            return Offer.ALIEN
        position, i, expected = found
        if expected != spec:
            return Offer.CONFLICT
        if self.schedule.batches[position].hole:
            return Offer.ALIEN
        self._put(position, i, entry)
        return Offer.TAKEN

    def _refill(self, set_id: int, spec: bytes) -> None:
        """Anonymous calls take the slots of their spec in turn; what is beyond a period waits for the next."""
        queue = self._queues.get((set_id, spec))
        places = self.schedule.anonymous[set_id, spec]
        while queue:
            position, i = places[self._turn[set_id, spec] % len(places)]
            if self._slots[position][i] is not None:
                return
            self._turn[set_id, spec] += 1
            self._put(position, i, queue.popleft())

    def _put(self, position: int, i: int, entry: T) -> None:
        self._slots[position][i] = entry
        self._missing[position] -= 1
        self._filled += 1

    def fill(self, batch: Batch, entries: Sequence[T], anonymous: bool, spec: bytes) -> bool:
        """A hole has been negotiated. False if ``batch`` belongs to no hole of this schedule."""
        if anonymous:
            places = [position for position, _ in self.schedule.anonymous.get((batch.set_id, spec), ())]
        else:
            found = self.schedule.named.get((batch.set_id, batch.names[0]))
            places = [found[0]] if found is not None else []
        holes = [position for position in places if self.schedule.batches[position].hole]
        if not holes:
            return False
        # The first that has the fewest waiting: negotiation may run a period ahead of launching.
        ahead = sorted(holes, key=lambda place: (len(self._holes.get(place, ())), (place - self._next) % self._size))
        self._holes.setdefault(ahead[0], deque()).append((batch, tuple(entries)))
        return True

    @property
    def position(self) -> int:
        """Which batch of the period is the next."""
        return self._next % self._size

    def waits(self) -> bool:
        """Whether an entry stands in a slot, or a filled hole, unlaunched."""
        return self._filled > 0 or any(self._holes.values())

    def ready(self) -> bool:
        """Whether ``launch`` has something to give."""
        if self.frozen:
            return False
        position = self._next % self._size
        return self._missing[position] == 0 or bool(self._holes.get(position))

    def launch(self) -> Launch[T]:
        """The next batch in order; only if ``ready``. It counts as launched from here on."""
        position = self._next % self._size
        planned = self.schedule.batches[position]
        slots = self._slots[position]
        batch: Batch | None = None
        if planned.hole:
            batch, entries = self._holes[position].popleft()
        else:
            entries = tuple(entry for entry in slots if entry is not None)
            self._slots[position] = [None] * len(slots)
            self._missing[position] = len(slots)
            self._filled -= len(slots)
            for name, spec in zip(planned.names, planned.specs):
                if not name:
                    self._refill(planned.set_id, spec)
        place = self._next
        self.launched[planned.set_id] = place
        self._next += 1
        self._skip()
        return Launch(place, planned, entries, batch)

    def freeze(self) -> tuple[tuple[int, int], ...]:
        """No launch after this; for each process set the last place that was launched."""
        self.frozen = True
        return tuple(sorted(self.launched.items()))

    def drain(self, highest: Mapping[int, int]) -> list[Launch[T]]:
        """What this rank must still take part in, with dummy memory, in order."""
        dummies = []
        until = max(highest.values(), default=-1)
        while self._next <= until:
            planned = self.schedule.batches[self._next % self._size]
            if self.schedule.mine[self._next % self._size] and self._next <= highest[planned.set_id]:
                waiting = self._holes.get(self._next % self._size)
                batch, entries = waiting.popleft() if waiting else (None, None)
                dummies.append(Launch(self._next, planned, entries, batch))
            self._next += 1
            self._skip()
        return dummies

    def _is_behind(self, position: int) -> bool:
        """Whether this position of the present period has run already."""
        place = self._next - self._next % self._size + position
        return place < self._next or place <= self._after.get(self.schedule.batches[position].set_id, -1)

    def _skip(self) -> None:
        """Moves on to the next batch that is this rank's own and has not run."""
        if not any(self.schedule.mine):
            return  # nothing in it is this rank's own
        while True:
            position = self._next % self._size
            planned = self.schedule.batches[position]
            if self.schedule.mine[position] and self._next > self._after.get(planned.set_id, -1):
                return
            self._next += 1
