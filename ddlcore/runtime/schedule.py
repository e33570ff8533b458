"""Tracks which buckets of a schedule one rank has launched, and which of its tensors wait in the slots.

This module uses no thread, no lock and no clock; its callers use a lock of their own. docs/design explains why all
ranks can safely leave a schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar, cast

from ddlcore.messages.to_rank import Arranged, Bucket, Planned
from ddlcore.runtime.delivery import Deliver, Later
from ddlcore.runtime.waiter import Waited
from ddlcore.types import Kind

# How many schedules the coordinator, and so every rank, remembers: those that were resumed last. A rank forgets no
# schedule that the coordinator may still resume without sending it again, since both see the same sequence of Resumes.
MOST_KNOWN = 16

_FOR_EVER = 1 << 62
_NOTHING = Planned(0, Kind.BARRIER, (), ())

T = TypeVar("T")


class Schedule:
    """The contents of a message Arranged, in the form that a rank needs for replay. It is computed once.

    ``mine`` says for each bucket whether this rank takes part. ``named`` and ``anonymous`` are tables that find the
    slot of a tensor: by its name, or by its spec if its call has no name.
    """

    def __init__(self, arranged: Arranged, sets: Mapping[int, Sequence[int]], rank: int) -> None:
        self.number = arranged.schedule
        self.digest = arranged.digest
        self.buckets = arranged.buckets
        self.mine = [rank in sets.get(planned.set_id, ()) for planned in arranged.buckets]
        self.named: dict[tuple[int, str], tuple[int, int, bytes]] = {}
        self.anonymous: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
        for position, planned in enumerate(arranged.buckets):
            for i, (name, spec) in enumerate(zip(planned.names, planned.specs)):
                if name:
                    self.named[planned.set_id, name] = (position, i, spec)
                else:
                    self.anonymous.setdefault((planned.set_id, spec), []).append((position, i))


class Offer(Enum):
    """The result of ``Replay.offer``: whether the schedule has taken the entry, and if not, why."""

    TAKEN = 0  # the entry is in its slot, or waits for the slot to be free
    ALIEN = 1  # the schedule has no slot for it: the coordinator must be asked
    CONFLICT = 2  # its name has a slot for another spec: the schedule cannot continue


class Position(Generic[T]):
    """One bucket of a schedule on this rank: the entries in its slots, and the function that runs the bucket."""

    __slots__ = (
        "entries",
        "index",
        "mine",
        "missing",
        "missing_when_empty",
        "nbytes",
        "planned",
        "resumable",
        "run",
        "set_id",
        "usual_s",
    )

    def __init__(self, index: int, planned: Planned, mine: bool) -> None:
        self.index = index
        self.planned = planned
        self.mine = mine
        # How to run it, and how many bytes it has. The dispatcher sets these at the first launch, not when the schedule
        # begins: ranks often leave a schedule before its last bucket, and an error of arranging a bucket fails only it.
        self.run: Run | None = None
        self.resumable: Resumable | None = None  # the same as ``run`` if a user thread may run the bucket, else None
        self.nbytes = 0  # -1: differs from launch to launch
        self.usual_s: float | None = None  # how long its first entry usually waits for the launch; None: not known yet
        self.set_id = planned.set_id
        self.missing = self.missing_when_empty = len(planned.names)
        self.entries: list[T | None] = [None] * self.missing  # the slots; a Launch keeps those it launched


NOWHERE: Position[Any] = Position(-1, _NOTHING, False)  # of a request that has no slot


@dataclass(slots=True, eq=False)  # made for each bucket: a frozen dataclass would take three times as long
class Launch(Generic[T]):
    """One launch of a bucket during replay. The object never changes.

    ``place`` is the number of the bucket, counted on through all periods. If ``entries`` is None, this rank takes part
    with dummy memory: all ranks are leaving replay, and the bucket's result will be dropped. There is one exception: if
    this rank has submitted the entries of a negotiated slot, the launch contains them even then, because their sizes
    were negotiated.
    """

    place: int
    position: Position[T]
    entries: Sequence[T] | None
    bucket: Bucket | None = None  # for a negotiated slot: the bucket that was negotiated
    number: int = -1  # counts the launches of this rank, over all schedules

    @property
    def planned(self) -> Planned:
        return self.position.planned


# Runs the bucket of a launch, and returns the function that delivers its results. The text names the fusion buffer in
# which they are kept until then.
Run = Callable[[Launch[Any], str], Deliver | Later]
HostRun = Callable[[Launch[Any], str], Deliver]


class Resumable(Protocol):
    """A way to run a bucket that a signal handler may interrupt on a user thread; another thread then continues."""

    def resume(self, launch: Launch[Any], operation: Waited | None = None) -> Deliver | None:
        """Begin to run the bucket, or continue after an interruption; see AtomicAllreduce.resume."""

    def forget(self) -> None:
        """Drop what is kept to continue the last launch, whose results have been delivered."""


class Replay(Generic[T]):
    """The progress of one rank in a schedule, from the message Resume to the message Drain.

    The place of a bucket is a number that is counted on through all periods: place = number of the period * number of
    buckets in the schedule + position in the schedule. ``T`` is the type of an entry.
    """

    def __init__(
        self,
        schedule: Schedule,
        start: int,
        after: Mapping[int, int],
        until: int = -1,
        usual_s: Sequence[float | None] = (),
    ) -> None:
        """Begin at place ``start``.

        ``after`` contains, for each process set, the last place that has already run; buckets up to that place are
        skipped. ``until`` is the place before which all ranks stop, or -1 if there is no such place. If ``until`` is
        given, ``turned`` becomes True whenever a period ends. ``usual_s``: of each bucket, the usual time in seconds until
        all its tensors are there, if it is known from earlier.
        """
        self.schedule = schedule
        self.frozen = False
        self.current: Position[T]  # the position of the next bucket
        self.turned = False  # a period has ended; the reader sets it back to False
        self.paused = False  # nothing more is launched, because the next place is at ``until`` or after it
        self._until = until if until >= 0 else _FOR_EVER
        self.turn_at = _FOR_EVER
        self.launched: dict[int, int] = {planned.set_id: after.get(planned.set_id, -1) for planned in schedule.buckets}
        self.positions: list[Position[T]] = [
            Position(i, planned, mine) for i, (planned, mine) in enumerate(zip(schedule.buckets, schedule.mine))
        ]
        for position, seconds in zip(self.positions, usual_s):
            position.usual_s = seconds
        self.filled = 0  # the number of entries in slots
        self._after = dict(after)
        self._idle = not any(schedule.mine)
        self.next = self._start = start  # the place of the next bucket
        self.negotiated_slots: dict[int, deque[tuple[Bucket, tuple[T, ...]]]] = {}
        self._queues: dict[tuple[int, bytes], deque[T]] = {}  # anonymous entries that wait for a slot
        self.turns: dict[tuple[int, bytes], int] = {}  # how many anonymous entries got a slot
        self.next, self.current, self.paused = self._from(start)
        self.turned = False
        if until >= 0:
            self.turn_at = self._period_end(self.next)
        for key, places in schedule.anonymous.items():  # count the calls of this period that had run before ``start``
            done = sum(1 for position, _ in places if self._is_behind(position))
            self.turns[key] = done

    def slot(self, set_id: int, name: str, spec: bytes) -> tuple[Position[T], int] | None:
        """Return the slot of the tensor ``name``: the position of its bucket, and the slot's number in that bucket.

        The slot is the same in every period. Return None if the schedule has no slot for this name and spec, or if the
        slot is negotiated.
        """
        found = self.schedule.named.get((set_id, name))
        if found is None or found[2] != spec or self.schedule.buckets[found[0]].negotiated:
            return None
        return self.positions[found[0]], found[1]

    def offer(self, set_id: int, name: str, anonymous: bool, spec: bytes, entry: T) -> Offer:
        """Put ``entry`` into its slot, if the schedule has a slot for it. Return whether the schedule has taken it.

        ``anonymous`` says that the call had no name. Such an entry may use any slot for its ``spec``. If no such slot
        is free, the entry waits for one.
        """
        if anonymous:
            if not self.fits(set_id, spec):
                return Offer.ALIEN
            self._queues.setdefault((set_id, spec), deque()).append(entry)
            self._refill(set_id, spec)
            return Offer.TAKEN
        found = self.schedule.named.get((set_id, name))
        if found is None:
            return Offer.ALIEN
        if found[2] != spec:
            return Offer.CONFLICT
        if self.schedule.buckets[found[0]].negotiated:
            return Offer.ALIEN
        self.put(self.positions[found[0]], found[1], entry)
        return Offer.TAKEN

    def fits(self, set_id: int, spec: bytes) -> bool:
        """Return whether the schedule has slots for unnamed calls with ``spec`` that need no negotiation."""
        places = self.schedule.anonymous.get((set_id, spec))
        return places is not None and not self.schedule.buckets[places[0][0]].negotiated

    def is_next(self, set_id: int, spec: bytes) -> bool:
        """Return whether the next bucket is the one in which an unnamed call with ``spec`` gets its slot now."""
        turn = self.turns.get((set_id, spec))
        if turn is None or self._queues.get((set_id, spec)):
            return False
        places = self.schedule.anonymous[set_id, spec]
        return places[turn % len(places)] == (self.current.index, 0) and not self.current.planned.negotiated

    def _refill(self, set_id: int, spec: bytes) -> None:
        """Put the waiting entries of unnamed calls with ``spec`` into the slots for ``spec``.

        The slots are filled in their order in the schedule, until the next slot is not free. The remaining entries wait
        for the next period.
        """
        queue = self._queues.get((set_id, spec))
        places = self.schedule.anonymous[set_id, spec]
        while queue:
            index, i = places[self.turns[set_id, spec] % len(places)]
            position = self.positions[index]
            if position.entries[i] is not None:
                return
            # Only the last of these lines is a call, see TensorQueue: an entry is in its slot and no longer in the
            # queue, or neither. If the queue came first, an interrupt could lose an entry that no other place holds.
            position.entries[i] = queue[0]
            position.missing -= 1
            self.filled += 1
            self.turns[set_id, spec] += 1
            queue.popleft()

    def refill(self) -> None:
        """Put the waiting entries of unnamed calls into the slots that are free again after a launch."""
        for key, queue in self._queues.items():
            if queue:
                self._refill(*key)

    @property
    def queued(self) -> bool:
        """Return whether an entry of an unnamed call waits for a slot.

        In that case ``refill`` must be called after the next launch.
        """
        return bool(self._queues) and any(self._queues.values())

    def holds(self, entry: T) -> bool:
        """Return whether ``entry`` is in a slot, or waits for a slot."""
        return any(entry is one for position in self.positions for one in position.entries) or any(
            entry is one for queue in self._queues.values() for one in queue
        )

    def put(self, position: Position[T], i: int, entry: T) -> None:
        """Put ``entry`` into slot ``i`` of ``position``. The slot must be free."""
        position.entries[i] = entry
        position.missing -= 1
        self.filled += 1

    def fill(self, bucket: Bucket, entries: Sequence[T], anonymous: bool, spec: bytes) -> bool:
        """Put the negotiated ``bucket`` and its ``entries`` into a negotiated slot for it, and return True.

        If this schedule has no negotiated slot for ``bucket``, do nothing and return False. ``anonymous`` says that the
        call had no name; then the slot is found by ``spec``.
        """
        if anonymous:
            places = [position for position, _ in self.schedule.anonymous.get((bucket.set_id, spec), ())]
        else:
            found = self.schedule.named.get((bucket.set_id, bucket.names[0]))
            places = [found[0]] if found is not None else []
        negotiated_slots = [position for position in places if self.schedule.buckets[position].negotiated]
        if not negotiated_slots:
            return False
        # Take the first slot with the fewest waiting buckets: negotiation may be a period ahead of launching, so the
        # slot that is next in order may already contain the bucket of the present period.
        size = len(self.positions)
        ahead = sorted(
            negotiated_slots, key=lambda place: (len(self.negotiated_slots.get(place, ())), (place - self.next) % size)
        )
        self.negotiated_slots.setdefault(ahead[0], deque()).append((bucket, tuple(entries)))
        return True

    @property
    def place(self) -> int:
        """Return the place of the next bucket to launch."""
        return self.next

    @property
    def periods(self) -> int:
        """Return how many periods (passes through the schedule) have ended since the message Resume."""
        size = len(self.positions)
        return self.next // size - self._start // size

    @property
    def filled_negotiated_slots(self) -> bool:
        """Return whether there is a filled negotiated slot that has not been launched yet."""
        return bool(self.negotiated_slots) and any(self.negotiated_slots.values())

    def waits(self) -> bool:
        """Return whether anything has not been launched yet: an entry in a slot, or a filled negotiated slot."""
        return self.filled > 0 or any(self.negotiated_slots.values())

    def ready(self) -> bool:
        """Return whether the next bucket can be launched: all its slots are filled, and this replay is not frozen."""
        if self.frozen:
            return False
        return self.current.missing == 0 or bool(
            self.negotiated_slots and self.negotiated_slots.get(self.current.index)
        )

    def launch(self, number: int = -1) -> Launch[T]:
        """Launch the next bucket in order and return it. Call this only if ``ready`` returns True.

        ``number`` is the number of the launch, counted over all schedules.
        """
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
            self.take_negotiated_slot(position)
        self.refill()
        return launch

    def step(
        self, number: int, alone: T | None = None
    ) -> tuple[Launch[T], list[T | None], int, Position[T], bool, int]:
        """Return the next launch and all values that ``launch`` would change, but change nothing.

        ``TensorQueue`` stores these values together with other changes. If the bucket has only one slot and that slot
        is still empty, ``alone`` is its entry. The result is a tuple of six items: the launch; the new, empty slots of
        its position, or an empty list if the slots do not change; the next place; the position of the next place;
        whether the replay pauses at the next place; and the place at which the new period ends, or -1 if no period has
        ended.
        """
        position = self.current
        place = self.next
        bucket: Bucket | None = None
        entries: Sequence[T]
        fresh: list[T | None] = []
        if alone is not None:
            entries = [alone]
        elif position.planned.negotiated:
            bucket, entries = self.negotiated_slots[position.index][0]
        else:
            entries = cast("list[T]", position.entries)  # all slots are filled
            fresh = [None] * len(entries)
        launch = Launch(place, position, entries, bucket, number)
        following, current, paused = self._from(place + 1)
        turn_at = self._period_end(following) if following >= self.turn_at else -1
        return launch, fresh, following, current, paused, turn_at

    def take_negotiated_slot(self, position: Position[T]) -> None:
        """Remove the first negotiated bucket from the negotiated slot at ``position``, because it has been launched."""
        self.negotiated_slots[position.index].popleft()

    def freeze(self) -> tuple[tuple[int, int], ...]:
        """Stop launching. Return, for each process set, a pair: its id and the place of its last launched bucket.

        The place is -1 if no bucket of the process set was launched.
        """
        self.frozen = True
        return tuple(sorted(self.launched.items()))

    def drain(self, highest: Mapping[int, int]) -> list[Launch[T]]:
        """Return, in order, the launches in which this rank must still take part with dummy memory.

        ``highest`` contains, by process set, the last place that any rank has launched.
        """
        dummies: list[Launch[T]] = []
        until = max(highest.values(), default=-1)
        # A peer that has launched one of these buckets waits in its collective, and cannot leave it before every member
        # has entered. So this rank enters each of them, in the same order, even if it has no data for it.
        while self.next <= until:
            position = self.current
            if position.mine and self.next <= highest[position.planned.set_id]:
                waiting = self.negotiated_slots.get(position.index)
                bucket, entries = waiting.popleft() if waiting else (None, None)
                dummies.append(Launch(self.next, position, entries, bucket))
            self.next, self.current, self.paused = self._from(self.next + 1)
        return dummies

    def _is_behind(self, index: int) -> bool:
        """Return whether the bucket with position ``index`` in the schedule has already run in the present period."""
        place = self.next - self.next % len(self.positions) + index
        return place < self.next or place <= self._after.get(self.positions[index].planned.set_id, -1)

    def _period_end(self, place: int) -> int:
        return (place // len(self.positions) + 1) * len(self.positions)

    def _from(self, place: int) -> tuple[int, Position[T], bool]:
        """Find the next bucket that this rank must run, at ``place`` or later.

        Return its place, its position, and a flag. If the flag is True, the replay pauses at the returned place. A rank
        must run the buckets of its own process sets, except for those that had already run before the message Resume.
        """
        size = len(self.positions)
        while True:
            if place >= self._until:
                nothing: Position[T] = Position(-1, _NOTHING, False)  # never ready, which spares a check for a pause
                nothing.missing = 1
                return place, nothing, True
            current = self.positions[place % size]
            if current.mine and place > self._after.get(current.set_id, -1):
                return place, current, False
            if self._idle:
                return place, current, False  # no bucket of the schedule is this rank's own
            place += 1
