"""Collectives that consist of messages between all pairs of ranks. They also do the reductions that Gloo cannot do.

Each rank sends to all other ranks at once, and reduces the received data in the order of the ranks with ddl's own
kernels. 16-bit floats are added in float32 and rounded once, and all of ddl's types are supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ddl_gloo.shim import GlooGroup, Message
from ddlcore.contracts.transport import Context, Memory
from ddlcore.types import Buffer, DType, ReduceOp

Piece = tuple[int, int, int]  # the other rank, the address, and the number of bytes


class Direct:
    """The collectives of one communicator. Each method returns when this rank has finished its part of the collective.

    A method raises RuntimeError if one of its messages fails.
    """

    def __init__(self, group: GlooGroup, context: Context) -> None:
        self._group = group
        self._kernels = context.kernels
        self._rank = context.rank
        self._size = context.size
        self._scratch = Memory(4096)
        later = [(context.rank + i) % context.size for i in range(1, context.size)]
        self._to, self._from = later, later[::-1]  # each rank begins with a different other rank

    def allreduce_whole(self, source: Buffer, target: Buffer, op: ReduceOp) -> None:
        """Run an allreduce in which every rank sends its whole tensor to all other ranks, and reduces all elements.

        This way takes only one network latency, but sends many bytes.
        """
        slots = self._slots(source.nbytes, source.address)
        everything = [(rank, source.address, source.nbytes) for rank in self._to]
        self._swap(everything, [(rank, slots[rank], source.nbytes) for rank in self._from])
        self._kernels.reduce(slots, target.address, source.count, source.dtype, op)

    def allreduce_shards(self, source: Buffer, target: Buffer, op: ReduceOp) -> None:
        """Run an allreduce in which each rank reduces one shard, and sends the result to all other ranks.

        This way sends as many bytes as a ring, and takes two network latencies.
        """
        least, more = divmod(source.count, self._size)
        counts = [least + (rank < more) for rank in range(self._size)]
        at = target.address + sum(counts[: self._rank]) * source.dtype.itemsize
        mine = Buffer(at, counts[self._rank], source.dtype, (counts[self._rank],), owner=target.owner)
        self.reducescatterv(source, mine, counts, op)
        self.allgatherv(mine, target, counts)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce the sources of all ranks, and write this rank's part of the result to ``target``.

        Each rank sends to every other rank the part of ``source`` that the other rank reduces. Rank r's part has
        ``counts[r]`` elements.
        """
        at = _addresses(source.address, counts, source.dtype)
        slots = self._slots(target.nbytes, at[self._rank])
        outgoing = [(rank, at[rank], counts[rank] * source.dtype.itemsize) for rank in self._to]
        self._swap(outgoing, [(rank, slots[rank], target.nbytes) for rank in self._from])
        if target.count:
            self._kernels.reduce(slots, target.address, target.count, source.dtype, op)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        """Send ``source``, this rank's part, to every other rank, and receive the parts of all ranks in ``target``.

        Rank r's part has ``counts[r]`` elements. ``source`` may be the memory of this rank's part in ``target``.
        """
        at = _addresses(target.address, counts, source.dtype)
        incoming = [(rank, at[rank], counts[rank] * source.dtype.itemsize) for rank in self._from]
        self._swap([(rank, source.address, source.nbytes) for rank in self._to], incoming)
        copy(source.address, at[self._rank], source.nbytes)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> None:
        """Send a part of ``source`` to every other rank, and receive the parts for this rank in ``target``.

        Rank s sends ``counts[s][d]`` elements to rank d.
        """
        me, size = self._rank, source.dtype.itemsize
        sent, got = counts[me], [row[me] for row in counts]
        out, into = _addresses(source.address, sent, source.dtype), _addresses(target.address, got, source.dtype)
        outgoing = [(rank, out[rank], sent[rank] * size) for rank in self._to]
        self._swap(outgoing, [(rank, into[rank], got[rank] * size) for rank in self._from])
        copy(out[me], into[me], sent[me] * size)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of rank ``root`` to ``buffer`` of every other rank."""
        piece = (buffer.address, buffer.nbytes)
        if self._rank == root:
            self._swap([(rank, *piece) for rank in self._to], ())
        else:
            self._swap((), [(root, *piece)])

    def barrier(self) -> None:
        """Run a barrier: exchange one byte with every other rank."""
        slots = self._slots(1, self._scratch.address)
        self._swap(
            [(rank, self._scratch.address, 1) for rank in self._to], [(rank, slots[rank], 1) for rank in self._from]
        )

    def _slots(self, nbytes: int, own: int) -> list[int]:
        """Return one address for each rank, with memory for ``nbytes`` bytes.

        For this rank, the address is ``own``. For the other ranks, the addresses are in temporary memory, which the
        next call uses again.
        """
        step = (nbytes + 63) & ~63
        if self._scratch.nbytes < self._size * step:
            self._scratch = Memory(self._size * step)
        slots = [self._scratch.address + rank * step for rank in range(self._size)]
        slots[self._rank] = own
        return slots

    def _swap(self, outgoing: Iterable[Piece], incoming: Iterable[Piece]) -> None:
        """Send and receive pieces of memory, all at the same time, and wait until all are sent and received.

        A piece is (other rank, address, number of bytes). Pieces of zero bytes are left out on both ranks.
        """
        messages: list[Message] = []
        try:
            messages += [self._group.recv(at, nbytes, rank) for rank, at, nbytes in incoming if nbytes]
            messages += [self._group.send(at, nbytes, rank) for rank, at, nbytes in outgoing if nbytes]
            messages.reverse()
            while messages:
                messages.pop().wait()  # in the order of posting
        finally:
            messages.clear()  # otherwise the traceback of an error would keep them, and so the group's connections


def copy(source: int, target: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes on this rank. The two ranges of memory must be identical, or must not overlap."""
    if source != target and nbytes:
        ctypes.memmove(target, source, nbytes)


def _addresses(address: int, counts: Sequence[int], dtype: DType) -> list[int]:
    """Return the address of each rank's part. The parts follow each other without gaps from ``address`` on.

    Part r has ``counts[r]`` elements.
    """
    return [address + before * dtype.itemsize for before in accumulate(counts[:-1], initial=0)]
