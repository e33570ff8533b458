"""What the threads of a rank call while a timeline is recorded: a store or two a call, and nothing is worked out.

Where none is recorded there are no trace hooks, and callers test for that once a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from ddlcore.messages import Bucket, Planned
from ddlcore.observe.ring_buffer import Code, RingBuffer

__all__ = ["Counted", "TraceHooks"]


class Counted(Protocol):
    """What is counted anyway; a bucket's own share is the difference to the bucket before."""

    pack_ns: int
    unpack_ns: int
    nbytes: list[int]


class TraceHooks:
    """Fills a ring. ``bucket`` is called by one thread at a time, all else by any."""

    def __init__(self, ring: RingBuffer, counted: Counted) -> None:
        self.ring = ring
        self._counted = counted
        self._pack_ns = counted.pack_ns
        self._unpack_ns = counted.unpack_ns
        self._nbytes = list(counted.nbytes)

    # --- once a tensor, or for many at once

    def submitting(self, submit: Callable[..., None]) -> Callable[..., None]:
        """``submit(entries, …)``, noting first when."""
        put = self.ring.put

        def noted(entries: Sequence[Any], *args: Any, **kinds: Any) -> None:
            now_ns = perf_counter_ns()
            for entry in entries:
                put(Code.READY, now_ns, entry.set_id, entry.name, entry.spec_bytes)
            submit(entries, *args, **kinds)

        return noted

    def starting(self, start: Callable[..., None]) -> Callable[..., None]:
        """``start(entry, …)`` of a persistent request, noting first when."""
        numbers, slots, mask, code = self.ring.numbers, self.ring.slots, self.ring.mask, Code.READY_TOGETHER

        def noted(entry: Any, address: int, owner: object, *args: Any) -> None:
            number = next(numbers)
            slots[number & mask] = (number, code, perf_counter_ns(), (entry,))
            start(entry, address, owner, *args)

        return noted

    def starting_all(self, start: Callable[..., None]) -> Callable[..., None]:
        """The same for many, of which each is (entry, address, owner)."""
        numbers, slots, mask, code = self.ring.numbers, self.ring.slots, self.ring.mask, Code.READY_TOGETHER

        def noted(started: Sequence[tuple[Any, int, object]], *args: Any, **kinds: Any) -> None:
            number = next(numbers)
            slots[number & mask] = (number, code, perf_counter_ns(), [one[0] for one in started])
            start(started, *args, **kinds)

        return noted

    # --- once a bucket

    def bucket(self, what: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """It has run. ``place``: in the schedule, -1 for one that was negotiated by itself."""
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
        """The coordinator's word for it has come."""
        self.ring.put(Code.DECIDED, perf_counter_ns(), bucket)

    def waited(self, since_ns: int, until_ns: int) -> None:
        """A thread of the user's stood still for it."""
        self.ring.put(Code.WAITED, since_ns, until_ns)

    # --- now and then

    def replay(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """From here on ``schedule`` is replayed."""
        self.ring.put(Code.REPLAY, perf_counter_ns(), epoch, schedule, buckets, start)

    def freeze(self, epoch: int) -> None:
        """Nothing more of it is launched."""
        self.ring.put(Code.FREEZE, perf_counter_ns(), epoch)

    def drain(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """What others had launched was taken part in, and what was held was judged."""
        self.ring.put(Code.DRAIN, begun_ns, perf_counter_ns(), epoch, valid, void)

    def discover(self, epoch: int) -> None:
        """From here on all is negotiated."""
        self.ring.put(Code.DISCOVER, perf_counter_ns(), epoch)

    def clock(self, offset_ns: int, error_ns: int) -> None:
        """Added to this process's clock, ``offset_ns`` gives the coordinator's."""
        self.ring.put(Code.CLOCK, perf_counter_ns(), offset_ns, error_ns)
