"""Pass records about a rank's work to the thread that writes the timeline, and define the fields of the records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

CAPACITY = 1 << 15  # records; a rank adds fewer between two reads by the writing thread

Record = tuple[Any, ...]  # (number, RecordKind, time in ns, fields of that code …)


class RecordKind(IntEnum):
    """The kind of a record. A record begins with its number, RecordKind and time. The comments list its other fields."""

    READY = 0  # set id, name, spec: the user has submitted this tensor
    READY_TOGETHER = 1  # persistent requests: the user has started all of them in one call
    DECIDED = 2  # Bucket: the coordinator has decided that this bucket runs
    BUCKET = 3  # end, pack, unpack (ns), place (-1: negotiated), Bucket or Planned, bytes: a bucket has run
    WAITED = 4  # end: a user's thread was in ``wait``
    REPLAY = 5  # epoch, number of the schedule, its buckets, first place
    FREEZE = 6  # epoch
    DRAIN = 7  # end, epoch, number of valid buckets, number of void buckets (of those still in flight)
    DISCOVER = 8  # epoch
    CLOCK = 9  # offset, error (ns): the coordinator's clock is ahead of this process's clock by offset


class RingBuffer:
    """A buffer with a fixed number of places for records. New records overwrite old records.

    Any thread may add records, and one thread reads them. No thread ever waits.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Create a buffer for ``capacity`` records. ``capacity`` must be a power of two."""
        assert capacity & (capacity - 1) == 0
        self.slots: list[Record | None] = [None] * capacity
        self.mask = capacity - 1
        self.numbers = itertools.count()  # ``next`` of it is atomic
        self.lost = 0  # records that were overwritten before they were read
        self._next = 0

    def put(self, *what: Any) -> None:
        """Add a record with the fields ``what``. The record also gets the next number. Any thread may call this.

        If the buffer is full, the record overwrites an old record.
        """
        # There is no lock, because a training thread must never wait for a trace, and a signal handler may add a record
        # while its thread is adding another one. This is safe, because each of the two steps is atomic in CPython. The
        # first step draws a number, which reserves a place. The second step stores one complete tuple that contains the
        # number. So the reader sees a whole record or none. The number shows whether the record is the next one, an old
        # one, or a later one. If a thread pauses between the two steps, the reader stops at that place until a later
        # call. Records may get lost in rare cases, but they are never mixed.
        number = next(self.numbers)
        self.slots[number & self.mask] = (number, *what)

    def take(self) -> Iterator[Record]:
        """Yield the records that were added since the last call, in the order of their numbers.

        Only one thread may call this method. Each yielded record is removed from the buffer.
        """
        while True:
            record = self.slots[self._next & self.mask]
            if record is None or record[0] < self._next:
                return
            if record[0] > self._next:  # records were overwritten; this is the oldest record that still exists
                self.lost += record[0] - self._next
                self._next = record[0]
            self.slots[self._next & self.mask] = None  # release the objects in the record
            self._next += 1
            yield record
