"""Record what the threads of a rank do while a timeline is recorded.

Each call stores one or two objects, and computes nothing. While no timeline is recorded, no trace hooks exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from ddlcore.messages import Bucket, Planned
from ddlcore.observe.ring_buffer import Code, RingBuffer


class Counted(Protocol):
    """Counters that exist even without a timeline.

    The share of one bucket is the difference between their values after this bucket and after the bucket before it.
    """

    pack_ns: int
    unpack_ns: int
    nbytes: list[int]


class TraceHooks:
    """Functions that put records into a ring buffer.

    One thread at a time calls ``completed``; any thread calls the others.
    """

    def __init__(self, ring: RingBuffer, counted: Counted) -> None:
        self.ring = ring
        self._counted = counted
        self._pack_ns = counted.pack_ns
        self._unpack_ns = counted.unpack_ns
        self._nbytes = list(counted.nbytes)

    # --- once for each tensor, or for many at once

    def submitted(self, entries: Sequence[Any], together: bool) -> None:
        """Record that a user's thread submits ``entries``; ``together``: they are persistent requests, started in one
        call.
        """
        ring, now_ns = self.ring, perf_counter_ns()
        if together:
            number = next(ring.numbers)
            ring.slots[number & ring.mask] = (number, Code.READY_TOGETHER, now_ns, entries)
            return
        for entry in entries:
            ring.put(Code.READY, now_ns, entry.set_id, entry.name, entry.spec_bytes)

    # --- once for each bucket

    def completed(self, what: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """Record that a bucket has run. ``place``: its place in the replay, -1 if it was negotiated."""
        ring, counted, kind = self.ring, self._counted, what.kind
        pack_ns, unpack_ns, nbytes = counted.pack_ns, counted.unpack_ns, counted.nbytes[kind]
        number = next(ring.numbers)
        ring.slots[number & ring.mask] = (
            number,
            Code.BUCKET,
            begun_ns,
            ended_ns,
            pack_ns - self._pack_ns,
            unpack_ns - self._unpack_ns,
            place,
            what,
            nbytes - self._nbytes[kind],
        )
        self._pack_ns, self._unpack_ns, self._nbytes[kind] = pack_ns, unpack_ns, nbytes

    def decided(self, bucket: Bucket) -> None:
        """Record that the coordinator has decided that ``bucket`` runs."""
        self.ring.put(Code.DECIDED, perf_counter_ns(), bucket)

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Record that a user's thread has waited in ddl from ``since_ns`` to ``until_ns``."""
        self.ring.put(Code.WAITED, since_ns, until_ns)

    # --- once for each change of mode

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """Record that ``schedule`` is replayed from now on, beginning with the bucket at place ``start``."""
        self.ring.put(Code.REPLAY, perf_counter_ns(), epoch, schedule, buckets, start)

    def frozen(self, epoch: int) -> None:
        """Record that this rank launches no bucket of the schedule any more."""
        self.ring.put(Code.FREEZE, perf_counter_ns(), epoch)

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """Record the end of a drain: everything that any rank had launched has now run.

        Of the buckets that this rank had launched and not yet delivered, ``valid`` had real data on all ranks, and
        ``void`` did not.
        """
        self.ring.put(Code.DRAIN, begun_ns, perf_counter_ns(), epoch, valid, void)

    def left(self, epoch: int) -> None:
        """Record that this rank has left replay: every bucket is negotiated from now on."""
        self.ring.put(Code.DISCOVER, perf_counter_ns(), epoch)

    def clock(self, offset_ns: int, error_ns: int) -> None:
        """Record that ``offset_ns``, added to this process's clock, gives the coordinator's clock."""
        self.ring.put(Code.CLOCK, perf_counter_ns(), offset_ns, error_ns)
