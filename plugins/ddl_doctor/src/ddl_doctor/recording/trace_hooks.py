"""Functions that the threads of a rank call to record their work for a timeline.

Each call is cheap: it only stores records. While no timeline is recorded, no TraceHooks object exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddlcore.messages.to_rank import Bucket, Planned


class Counted(Protocol):
    """Counters that a rank has even without a timeline. They only increase.

    The value for one bucket is the increase of a counter from the end of the bucket before to the end of this bucket.
    """

    pack_ns: int
    unpack_ns: int
    nbytes: list[int]


class TraceHooks:
    """The functions that add records about a rank's work to the buffer ``ring``.

    Only one thread at a time may call ``completed``. Any thread may call the other methods.
    """

    on = True

    def __init__(self, ring: RingBuffer, counted: Counted) -> None:
        self.ring = ring
        self._counted = counted
        self._pack_ns = counted.pack_ns
        self._unpack_ns = counted.unpack_ns
        self._nbytes = list(counted.nbytes)

    # --- once for each tensor, or for many at once

    def submitted(self, entries: Sequence[Any], together: bool) -> None:
        """Record that a user's thread submits ``entries``, the entries of the tensor queue.

        If ``together`` is true, the entries are persistent requests that are started in one call.
        """
        ring, now_ns = self.ring, perf_counter_ns()
        if together:
            number = next(ring.numbers)
            ring.slots[number & ring.mask] = (number, RecordKind.READY_TOGETHER, now_ns, entries)
            return
        for entry in entries:
            ring.put(RecordKind.READY, now_ns, entry.set_id, entry.name, entry.spec_bytes)

    # --- once for each bucket

    def completed(self, what: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """Record that the bucket ``what`` has run from ``begun_ns`` to ``ended_ns``.

        ``place`` is the bucket's number in the replay, or -1 if the bucket was negotiated. The number is s * n + p: s
        is the number of the step in the replay, n is the number of buckets in the schedule, and p is the bucket's
        position in the schedule.
        """
        ring, counted, kind = self.ring, self._counted, what.kind
        pack_ns, unpack_ns, nbytes = counted.pack_ns, counted.unpack_ns, counted.nbytes[kind]
        number = next(ring.numbers)
        ring.slots[number & ring.mask] = (
            number,
            RecordKind.BUCKET,
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
        self.ring.put(RecordKind.DECIDED, perf_counter_ns(), bucket)

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Record that a user's thread has waited in ddl from ``since_ns`` to ``until_ns``."""
        self.ring.put(RecordKind.WAITED, since_ns, until_ns)

    # --- once for each change of mode

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """Record that the replay of a schedule begins.

        ``schedule`` is the number of the schedule, and ``buckets`` are its buckets. ``start`` is the place (see
        ``completed``) of the first bucket that is replayed.
        """
        self.ring.put(RecordKind.REPLAY, perf_counter_ns(), epoch, schedule, buckets, start)

    def frozen(self, epoch: int) -> None:
        """Record a freeze: from now on, this rank launches no bucket of the schedule."""
        self.ring.put(RecordKind.FREEZE, perf_counter_ns(), epoch)

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """Record the end of a drain that began at ``begun_ns``: all buckets that any rank had launched have now run.

        At the begin of the drain, this rank had launched some buckets that were not completed. ``valid`` of these
        buckets had real data on all ranks, and ``void`` of them had not.
        """
        self.ring.put(RecordKind.DRAIN, begun_ns, perf_counter_ns(), epoch, valid, void)

    def left(self, epoch: int) -> None:
        """Record that this rank has left replay. From now on, every bucket is negotiated."""
        self.ring.put(RecordKind.DISCOVER, perf_counter_ns(), epoch)
