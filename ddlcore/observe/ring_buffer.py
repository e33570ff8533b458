"""Pass records from the working threads to the thread that writes them down, and define what a record holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

CAPACITY = 1 << 15  # records; more than a rank makes between two reads of the writer

Record = tuple[Any, ...]  # (number, Code, time in ns, fields of that code …)


class Code(IntEnum):
    """What a record reports. The comments list its fields after number, code and time."""

    READY = 0  # set id, name, spec: the user has submitted this tensor
    READY_TOGETHER = 1  # persistent requests: the user has started all of these
    DECIDED = 2  # Bucket: the coordinator has decided on it
    BUCKET = 3  # end, pack, unpack (ns), place (-1: negotiated), Bucket or Planned, bytes: a bucket has run
    WAITED = 4  # end: a user's thread was in ``wait``
    REPLAY = 5  # epoch, number of the schedule, its buckets, first place
    FREEZE = 6  # epoch
    DRAIN = 7  # end, epoch, number of valid and of void buckets among those that were held
    DISCOVER = 8  # epoch
    CLOCK = 9  # offset, error (ns): the coordinator's clock relative to ours


class RingBuffer:
    """A fixed number of slots for records, which are used over and over again.

    Any thread may add records, and one thread reads them. No thread blocks.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Make a buffer of ``capacity`` slots, a power of two."""
        assert capacity & (capacity - 1) == 0
        self.slots: list[Record | None] = [None] * capacity
        self.mask = capacity - 1
        self.numbers = itertools.count()  # ``next`` of it is atomic
        self.lost = 0  # records that were overwritten before they were read
        self._next = 0

    def put(self, *what: Any) -> None:
        """Add a record of the fields ``what``, with the next number in front. Any thread may call this.

        If the buffer is full, the record overwrites an old one.
        """
        # There is no lock, because a training thread must never wait for a trace, and a signal handler may record in
        # the middle of another record. It is safe since each of the two steps is atomic in CPython: drawing a number,
        # which reserves a slot, and storing one tuple that is complete and contains its number. A reader therefore sees
        # a whole record or none, and recognizes by the number whether the record is the next one, is left from an
        # earlier round, or belongs to a later round. If a thread pauses between the two steps, the reader stops at
        # that slot until a later call. Records may get lost in rare cases, but they are never mixed.
        number = next(self.numbers)
        self.slots[number & self.mask] = (number, *what)

    def take(self) -> Iterator[Record]:
        """Yield the records that were added since the last call, in order. Only one thread may call this."""
        while True:
            record = self.slots[self._next & self.mask]
            if record is None or record[0] < self._next:
                return
            if record[0] > self._next:  # overwritten at least once: this is the oldest record that is left
                self.lost += record[0] - self._next
                self._next = record[0]
            self.slots[self._next & self.mask] = None  # otherwise it would keep alive what it refers to
            self._next += 1
            yield record
