"""Runs the collectives of one MPI communicator as steps: each step is a request of MPI that must be waited for."""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ddl_mpi.waiting import ARRIVAL, CROWDED, DATA, Step
from ddlcore.contracts.transport import Context, Memory
from ddlcore.errors import TransportError
from ddlcore.types import Buffer, DType, ReduceOp

K = TypeVar("K")
# From this size on, ranks wait for each other before they send, so that a rank can sleep while another rank is late.
LARGE_BYTES = 64 << 10
PERSIST_AFTER = 3  # after so many calls with the same memory, a persistent request is created
REMEMBERED = 256  # entries of ``_requests``; a request needs some hundred bytes, in some MPIs also a temporary buffer
SIXTEEN_BITS = (DType.F16, DType.BF16)
ORDERED = (ReduceOp.Min, ReduceOp.Max)
OPS = {ReduceOp.Sum: "SUM", ReduceOp.Min: "MIN", ReduceOp.Max: "MAX", ReduceOp.Product: "PROD"}
BOOL_OPS = {ReduceOp.Sum: "MAX", ReduceOp.Min: "MIN", ReduceOp.Max: "MAX", ReduceOp.Product: "MIN"}  # of 0 and 1
TYPES = {
    DType.U8: "UINT8_T",
    DType.I8: "INT8_T",
    DType.U16: "UINT16_T",
    DType.I16: "INT16_T",
    DType.I32: "INT32_T",
    DType.I64: "INT64_T",
    DType.F32: "FLOAT",
    DType.F64: "DOUBLE",
    DType.BOOL: "UINT8_T",
}
MOVED = {1: "UINT8_T", 2: "UINT16_T", 4: "INT32_T", 8: "INT64_T"}  # types for data that is only moved, by width

# The indices of the words that a rank contributes when ranks meet, that is, wait for each other before a collective.
# An allreduce replaces each word by the minimum over all ranks.
SEPARATE = 0  # 1 if source and target are different memory
WANTED = 1  # 1 if a persistent request is worthwhile
# The number of the rank's persistent request (0: none), and the negative number. The minimum of the negative numbers
# gives the maximum of the numbers. So one allreduce shows whether all ranks have the same number.
NUMBER, NEGATIVE = 2, 3
WORDS = 4


class _Persistent(NamedTuple):
    number: int
    request: Any


class MpiCollectives:
    """The collectives of one MPI communicator.

    Each of them is an iterator of steps. Only one collective may be under way at a time.
    """

    def __init__(self) -> None:
        self._mpi: Any = None
        self._comm: Any = None
        self._context: Context
        self._words = (ctypes.c_int32 * WORDS)()
        self._meeting: Any = None  # a persistent request
        self._requests: OrderedDict[tuple[int, ...], Any] = OrderedDict()  # by memory: call count, or _Persistent
        self._persists = True
        self._data = DATA
        self._made = 0  # number of persistent requests created so far; the same on all ranks
        self._scratch: Memory | None = None

    def open(self, mpi: Any, comm: Any, context: Context, allocate: Callable[[int], Memory]) -> None:
        """Use the communicator ``comm`` of the module ``mpi`` from now on, for the ranks of ``context``.

        ``allocate`` returns new memory of so many bytes.
        """
        self._mpi, self._comm, self._context, self._allocate = mpi, comm, context, allocate
        self._types, self._moved_types = _looked_up(mpi, TYPES), _looked_up(mpi, MOVED)
        ops, bool_ops = _looked_up(mpi, OPS), _looked_up(mpi, BOOL_OPS)
        self._ops = {dtype: bool_ops if dtype is DType.BOOL else ops for dtype in TYPES}
        self._meeting = comm.Allreduce_init(
            mpi.IN_PLACE, [mpi.buffer.fromaddress(ctypes.addressof(self._words), 4 * WORDS), mpi.INT32_T], mpi.MIN
        )
        self._persists = bool(context.settings.get("mpi_persistent", True))
        here = [member for member in context.members if member.host == context.members[context.rank].host]
        self._data = CROWDED if len(here) > len(os.sched_getaffinity(0)) else DATA

    def free(self) -> None:
        """Free all persistent requests. No collective may be under way."""
        self._forget(0)
        self._meeting.Free()

    # --- the collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        """Reduce the sources of all ranks into the target of every rank."""
        if _is_ours(source, op):
            return self._reduce_ourselves(source, target, op)
        if source.nbytes < LARGE_BYTES:
            return self._small_allreduce(source, target, op)
        return self._large_allreduce(source, target, op)

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Iterator[Step]:
        """Write the sources of all ranks, of ``counts`` elements each, to the target of every rank, in rank order."""
        large = sum(counts) * source.dtype.itemsize >= LARGE_BYTES
        if large:
            yield self._meet()
        yield self._gather(self._moved(source), target, counts), self._data if large else ARRIVAL

    def broadcast(self, buffer: Buffer, root: int) -> Iterator[Step]:
        """Copy the buffer of the rank ``root`` to the buffers of all other ranks."""
        large = buffer.nbytes >= LARGE_BYTES
        if large:
            yield self._meet()
        yield self._comm.Ibcast(self._moved(buffer), root), self._data if large else ARRIVAL

    def reducescatter(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Iterator[Step]:
        """Reduce the sources of all ranks, of which the rank r gets ``counts[r]`` elements in its target."""
        large = source.nbytes >= LARGE_BYTES
        if _is_ours(source, op):
            return self._scatter_ourselves(source, target.address, counts, op, large)
        return self._scatter(source, target, counts, op, large)

    def alltoall(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Iterator[Step]:
        """Send ``counts[i][j]`` elements from each rank i to each rank j."""
        large = sum(map(sum, counts)) * source.dtype.itemsize >= LARGE_BYTES
        if large:
            yield self._meet()
        yield self._exchange(source, target, counts), self._data if large else ARRIVAL

    def barrier(self) -> Iterator[Step]:
        """Wait until all ranks have called this method."""
        yield self._meet()

    # --- how they are carried out

    def _meet(self, separate: bool = False, wanted: bool = False, number: int = 0) -> Step:
        """Return a step that ends when all ranks have called this method, and exchanges four numbers, called words.

        The words of this rank are ``separate``, ``wanted``, ``number`` and -``number``; see SEPARATE, WANTED, NUMBER
        and NEGATIVE. At the end, each element of ``_words`` is the minimum of this word over all ranks.
        """
        self._words[:] = [int(separate), int(wanted), number, -number]
        self._meeting.Start()
        return self._meeting, ARRIVAL

    def _small_allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        if source.address != target.address:  # another rank may reduce in place, and then all must
            self._copy(source, target)
        yield self._comm.Iallreduce(self._mpi.IN_PLACE, self._reduced(target), self._ops[source.dtype][op]), ARRIVAL

    def _large_allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        """Reduce a large tensor with a persistent request of MPI, or with an ordinary call.

        A persistent request is used if all ranks already have the same request for their memory, or if all ranks want
        to create a new one. Otherwise, an ordinary call is made.
        """
        key = (source.address, target.address, source.count, source.dtype, op)
        kept = self._requests.pop(key, 0)
        ready = isinstance(kept, _Persistent)
        two = source.address != target.address
        # All ranks must create and start a persistent request together. But each rank knows only its own addresses and
        # its own number of calls. If one rank started its old request while another rank created a new one, the job
        # would hang. So the ranks meet first, and use or create a request only if all of them can.
        yield self._meet(two, ready or (self._persists and kept >= PERSIST_AFTER), kept.number if ready else 0)
        separate, wanted, least, greatest = self._words[:]
        if two and not separate:  # if one rank reduces in place, all must
            self._copy(source, target)
        if wanted and 0 < least == -greatest:
            request = kept.request
            request.Start()
        else:
            memory = (self._reduced(source) if separate else self._mpi.IN_PLACE, self._reduced(target))
            if wanted:  # all ranks make a new request, together
                if ready:
                    kept.request.Free()
                self._made += 1
                request = self._comm.Allreduce_init(*memory, self._ops[source.dtype][op])
                kept = _Persistent(self._made, request)
                request.Start()
            else:
                request = self._comm.Iallreduce(*memory, self._ops[source.dtype][op])
                kept = kept if ready else kept + 1
        self._requests[key] = kept
        self._forget(REMEMBERED)
        yield request, self._data

    def _forget(self, limit: int) -> None:
        """Remove the oldest entries of ``_requests`` until ``limit`` entries remain. Free their persistent requests."""
        while len(self._requests) > limit:
            _, kept = self._requests.popitem(last=False)
            if isinstance(kept, _Persistent):
                kept.request.Free()

    def _reduce_ourselves(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        """Run an allreduce with ddl's kernels: each rank reduces one part, and then all ranks gather the parts.

        This way sends as many bytes as a ring. Sums of 16-bit floats are rounded once, and no NaN is lost.
        """
        context, large = self._context, source.nbytes >= LARGE_BYTES
        size = context.size
        counts = [source.count // size + (rank < source.count % size) for rank in range(size)]
        mine = target.address + sum(counts[: context.rank]) * target.dtype.itemsize
        yield from self._scatter_ourselves(source, mine, counts, op, large)
        yield self._gather(self._mpi.IN_PLACE, target, counts), self._data if large else ARRIVAL

    def _scatter(
        self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp, large: bool
    ) -> Iterator[Step]:
        if large:
            yield self._meet()
        memory = (self._reduced(source), self._reduced(target))
        request = self._comm.Ireduce_scatter(*memory, list(counts), self._ops[source.dtype][op])
        yield request, self._data if large else ARRIVAL

    def _scatter_ourselves(
        self, source: Buffer, target: int, counts: Sequence[int], op: ReduceOp, large: bool
    ) -> Iterator[Step]:
        if source.device.kind != "cpu":
            raise TransportError(f"mpi: {source.dtype.label} on {source.device} cannot be reduced; copy it to the host")
        context = self._context
        size, mine, width = context.size, counts[context.rank], source.dtype.itemsize
        parts = self._temporary(size * mine, source.dtype)
        if large:
            yield self._meet()
        yield self._exchange(source, parts, [counts] * size), self._data if large else ARRIVAL
        addresses = [parts.address + rank * mine * width for rank in range(size)]
        if mine:
            context.kernels.reduce(addresses, target, mine, source.dtype, op)

    def _temporary(self, count: int, dtype: DType) -> Buffer:
        """Return temporary memory for ``count`` elements.

        The next call returns the same memory, if the memory is large enough.
        """
        nbytes = count * dtype.itemsize
        memory = self._scratch
        if memory is None or memory.nbytes < nbytes:
            memory = self._scratch = self._allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    # --- arguments for MPI

    def _gather(self, source: Any, target: Buffer, counts: Sequence[int]) -> Any:
        return self._comm.Iallgatherv(source, self._laid_out(target, counts))

    def _exchange(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Any:
        rank = self._context.rank
        received = [row[rank] for row in counts]
        return self._comm.Ialltoallv(self._laid_out(source, counts[rank]), self._laid_out(target, received))

    def _reduced(self, buffer: Buffer) -> list[Any]:
        memory = self._mpi.buffer.fromaddress(buffer.address, buffer.nbytes)
        return [memory, buffer.count, self._types[buffer.dtype]]

    def _moved(self, buffer: Buffer) -> list[Any]:
        memory = self._mpi.buffer.fromaddress(buffer.address, buffer.nbytes)
        return [memory, buffer.count, self._moved_types[buffer.dtype.itemsize]]

    def _laid_out(self, buffer: Buffer, counts: Sequence[int]) -> list[Any]:
        """Return mpi4py's description of ``buffer`` as consecutive parts. Part i has ``counts[i]`` elements."""
        memory, _, datatype = self._moved(buffer)
        return [memory, (list(counts), [0, *accumulate(counts)][:-1]), datatype]

    def _copy(self, source: Buffer, target: Buffer) -> None:
        if source.device.kind == "cpu":
            ctypes.memmove(target.address, source.address, source.nbytes)
        else:  # MPI can access device memory
            self._mpi.COMM_SELF.Sendrecv(self._moved(source), 0, 0, self._moved(target), 0, 0)


def _is_ours(source: Buffer, op: ReduceOp) -> bool:
    """Return whether ddl's kernels, and not MPI, must reduce ``source`` by ``op``.

    The kernels can only reduce host memory. There are two reasons not to use MPI. MPI adds 16-bit floats in 16 bits.
    And MPI finds the minimum or maximum of floats by comparisons, so with a NaN each rank may get a different result.
    """
    chosen = op in ORDERED and source.dtype.is_float and source.device.kind == "cpu"
    return chosen or source.dtype in SIXTEEN_BITS


def _looked_up(mpi: Any, names: Mapping[K, str]) -> dict[K, Any]:
    return {key: getattr(mpi, name) for key, name in names.items()}
