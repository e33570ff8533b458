"""The ring between the threads that do something and the one that writes it down: what a record holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

__all__ = ["CAPACITY", "Code", "Record", "RingBuffer"]

CAPACITY = 1 << 15  # records; more than a rank makes between two looks of the writer

Record = tuple[Any, ...]  # (number, Code, time in ns, what else the code says)


class Code(IntEnum):
    """What a record tells, and what follows number, code and time in it."""

    READY = 0  # set id, name, spec: the user has asked for this tensor
    READY_TOGETHER = 1  # persistent requests: for all of these
    DECIDED = 2  # Bucket: the coordinator's word has come
    BUCKET = 3  # end, pack, unpack (all ns), place (-1: negotiated), Bucket or Planned, bytes: it has run
    WAITED = 4  # end: a thread of the user's stood in ``wait``
    REPLAY = 5  # epoch, number of the schedule, its buckets, first place
    FREEZE = 6  # epoch
    DRAIN = 7  # end, epoch, buckets that were valid, and void, of those that had been held
    DISCOVER = 8  # epoch
    CLOCK = 9  # offset, error (ns): our clock, and that of the coordinator


class RingBuffer:
    """A row of slots that is filled by any thread, over and over, and emptied by one. Nobody waits for anybody."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """``capacity``: a power of two."""
        assert capacity & (capacity - 1) == 0
        self.slots: list[Record | None] = [None] * capacity
        self.mask = capacity - 1
        self.numbers = itertools.count()  # drawing the next one is atomic
        self.lost = 0  # records that were overwritten before they were read
        self._next = 0

    def put(self, *what: Any) -> None:
        """Adds a record, without its number. Any thread; an old record that nobody has read makes room."""
        number = next(self.numbers)
        self.slots[number & self.mask] = (number, *what)

    def take(self) -> Iterator[Record]:
        """What was put since the last call, in order. One thread."""
        while True:
            record = self.slots[self._next & self.mask]
            if record is None or record[0] < self._next:
                return
            if record[0] > self._next:  # a whole round or more has gone by: what is oldest now stands behind
                self.lost += record[0] - self._next
                self._next = record[0]
            self.slots[self._next & self.mask] = None  # lest it keep alive what it names
            self._next += 1
            yield record
