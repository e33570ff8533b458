"""Reductions that NCCL does not do as ddl promises: NCCL moves the bytes, and ddl's kernels on the device reduce them.

NCCL adds 16-bit floats in 16 bits with a rounding at each hop, its min and max lose a NaN, and it has no 16-bit
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ddl_nccl.codes import BYTES
from ddl_nccl.layer import Raw
from ddl_nccl.scratch import Scratch
from ddlcore.contracts.device import Queue
from ddlcore.types import Buffer, DType, ReduceOp

WHOLE_BYTES = 1 << 20  # up to this total, every rank gets everything, in one pass through the network
PIECE_BYTES = 32 << 20  # larger tensors are cut into pieces of this size, to limit scratch memory
ALIGNED_BYTES = 16  # the alignment of a shard: NCCL and the kernels move so many bytes at once


class OwnReductions:
    """The reductions that ddl's own kernels compute for one communicator.

    Every method queues its work and returns. All ranks get bitwise the same results. ``on`` is a function that returns
    the communicator and the stream. It is called again for each call of NCCL, because the communicator may have been
    aborted meanwhile. Values are reduced in the order of ranks; 16-bit floats are added in float32 and rounded once.
    """

    def __init__(self, raw: Raw, on: Callable[[], tuple[Any, int]], queue: Queue, rank: int, size: int) -> None:
        self._raw, self._on, self._queue = raw, on, queue
        self._rank, self._size = rank, size
        self._scratch = Scratch(queue)

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> None:
        """Queue an allreduce of at least one element.

        If the tensor is not small, each rank sends as many bytes as in a ring allreduce.
        """
        width = source.dtype.itemsize
        piece = PIECE_BYTES // width
        for first in range(0, source.count, piece):
            count = min(piece, source.count - first)
            self._piece(source.address + first * width, target.address + first * width, count, source.dtype, op)

    def _piece(self, source: int, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        width = dtype.itemsize
        unit = ALIGNED_BYTES // width
        share = 0 if count * width * self._size <= WHOLE_BYTES else count // (self._size * unit) * unit
        if share:
            mine = target + self._rank * share * width
            self._scatter(source, mine, [share] * self._size, dtype, op)
            self._raw.all_gather(mine, target, share * width, BYTES, *self._on())
        done = share * self._size
        if done < count:  # all elements, or the rest that cannot be divided into equal aligned shards
            self._whole(source + done * width, target + done * width, count - done, dtype, op)

    def _whole(self, source: int, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        """Send every rank's ``count`` elements to all ranks, and reduce all of them on each rank.

        ``source`` and ``target`` are addresses.
        """
        nbytes = count * dtype.itemsize
        slots = self._scratch.address(self._size * nbytes)
        self._raw.all_gather(source, slots, nbytes, BYTES, *self._on())
        self._reduce([slots + rank * nbytes for rank in range(self._size)], target, count, dtype, op)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> None:
        """Queue a reducescatter. ``counts[r]`` is the number of elements that rank r gets.

        At least one rank must get an element. The part of this rank may be empty.
        """
        self._scatter(source.address, target.address, counts, source.dtype, op)

    def _scatter(self, source: int, target: int, counts: Sequence[int], dtype: DType, op: ReduceOp) -> None:
        """Send to every other rank the elements which that rank reduces, and reduce the elements of this rank.

        ``source`` and ``target`` are addresses. ``counts[r]`` is the number of elements that rank r reduces.
        """
        width, me = dtype.itemsize, self._rank
        at = [source + before * width for before in accumulate(counts[:-1], initial=0)]
        step = -(-counts[me] * width // ALIGNED_BYTES) * ALIGNED_BYTES
        slots = self._scratch.address(self._size * step) if counts[me] else 0
        raw = self._raw
        raw.group_start()
        try:
            for peer in self._others():
                if counts[peer]:
                    raw.send(at[peer], counts[peer] * width, BYTES, peer, *self._on())
                if counts[me]:
                    raw.recv(slots + peer * step, counts[me] * width, BYTES, peer, *self._on())
        finally:
            raw.group_end()
        if counts[me]:
            parts = [slots + rank * step for rank in range(self._size)]
            parts[me] = at[me]
            self._reduce(parts, target, counts[me], dtype, op)

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next rank, so that not all ranks send to the same rank first."""
        return [(self._rank + i) % self._size for i in range(1, self._size)]

    def _reduce(self, parts: Sequence[int], target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        if op is ReduceOp.Average:
            self._queue.kernels.reduce(parts, target, count, dtype, ReduceOp.Sum, 1.0 / self._size)
        else:
            self._queue.kernels.reduce(parts, target, count, dtype, op)
