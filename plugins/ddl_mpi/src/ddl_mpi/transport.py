"""The transport over MPI: it runs each collective by calls of MPI, on one MPI communicator for each group of ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ddl_mpi import meeting, process
from ddl_mpi.waiting import ARRIVAL, CROWDED, DATA, Step, Steps
from ddlcore.contracts.transport import Capabilities, Context, Memory, Transport, Work, dense
from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.types import Buffer, DType, ReduceOp

K = TypeVar("K")
log = logging.getLogger("ddl")
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


class MpiTransport(Transport):
    """A transport for ranks that were all started by one mpiexec (or srun, …).

    After ``open``, only the thread that calls a method of this object calls MPI.
    """

    capabilities = Capabilities(thread_bound=True)

    def __init__(self) -> None:
        self._mpi: Any = None
        self._comm: Any = None
        self._words = (ctypes.c_int32 * WORDS)()
        self._meeting: Any = None  # a persistent request
        self._requests: OrderedDict[tuple[int, ...], Any] = OrderedDict()  # by memory: call count, or _Persistent
        self._persists = True
        self._data = DATA
        self._made = 0  # number of persistent requests created so far; the same on all ranks
        self._scratch: dict[str, Memory] = {}
        self._aborted = False
        self._attends = False
        self._under_way: object = None  # the memory to which MPI may write now
        self._lock = threading.Lock()  # abort() may come from any thread during close()

    def open(self, context: Context) -> None:
        super().open(context)
        self._mpi, self._comm = mpi, _ = meeting.meet(context, self._check)
        self._types, self._moved_types = _looked_up(mpi, TYPES), _looked_up(mpi, MOVED)
        self._ops, self._bool_ops = _looked_up(mpi, OPS), _looked_up(mpi, BOOL_OPS)
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._meeting = self._comm.Allreduce_init(
            mpi.IN_PLACE, [mpi.buffer.fromaddress(ctypes.addressof(self._words), 4 * WORDS), mpi.INT32_T], mpi.MIN
        )
        self._persists = bool(context.settings.get("mpi_persistent", True))
        here = [member for member in context.members if member.host == context.members[context.rank].host]
        self._data = CROWDED if len(here) > len(os.sched_getaffinity(0)) else DATA
        devices = frozenset({"cpu", "cuda"}) if process.cuda_aware() else frozenset({"cpu"})
        log.debug("mpi: %s by %s, memory of %s", self._name(), process.library_version(), " and ".join(sorted(devices)))
        bound = mpi.Query_thread() < mpi.THREAD_SERIALIZED
        self.capabilities = replace(self.capabilities, devices=devices, thread_bound=bound)

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        super().open(context)
        self._attends = True  # MPI_Finalize would wait for the other processes, as MPI_Init does
        meeting.begin(context, check)

    def close(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, None
            self._attends = False
        if comm is None:
            return
        if self._aborted or self._under_way is not None:
            process.forsake(comm, self._meeting, self._words, self._requests, self._scratch, self._under_way)
            return
        self._forget(0)
        self._meeting.Free()
        comm.Free()

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            if self._comm is not None or self._attends:
                process.forsake()  # from now on this process ends without MPI_Finalize

    # --- the collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        if _is_ours(source, op):
            return self._begin(self._reduce_ourselves(source, target, op), source, target)
        if source.nbytes < LARGE_BYTES:
            return self._begin(self._small_allreduce(source, target, op), source, target)
        return self._begin(self._large_allreduce(source, target, op), source, target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        large = sum(counts) * source.dtype.itemsize >= LARGE_BYTES
        send = lambda: self._gather(self._moved(source), target, counts)  # noqa: E731
        return self._begin(self._moving(send, large), source, target)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        send = lambda: self._comm.Ibcast(self._moved(buffer), root)  # noqa: E731
        return self._begin(self._moving(send, buffer.nbytes >= LARGE_BYTES), buffer)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        large = source.nbytes >= LARGE_BYTES
        if _is_ours(source, op):
            return self._begin(self._scatter_ourselves(source, target.address, counts, op, large), source, target)

        def send() -> Any:
            return self._comm.Ireduce_scatter(
                self._reduced(source), self._reduced(target), list(counts), self._op(op, source.dtype)
            )

        return self._begin(self._moving(send, large), source, target)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        large = sum(map(sum, counts)) * source.dtype.itemsize >= LARGE_BYTES
        send = lambda: self._exchange(source, target, counts)  # noqa: E731
        return self._begin(self._moving(send, large), source, target)

    def barrier(self) -> Work:
        return self._begin(self._meet())

    # --- collectives as steps: each yields a request to wait for

    def _meet(self, separate: bool = False, wanted: bool = False, number: int = 0) -> Iterator[Step]:
        """Wait until all ranks have called this method, and exchange four numbers, called words.

        The words of this rank are ``separate``, ``wanted``, ``number`` and -``number``; see SEPARATE, WANTED, NUMBER
        and NEGATIVE. At the end, each element of ``_words`` is the minimum of this word over all ranks.
        """
        self._words[:] = [int(separate), int(wanted), number, -number]
        self._meeting.Start()
        yield self._meeting, ARRIVAL

    def _moving(self, send: Callable[[], Any], large: bool) -> Iterator[Step]:
        if large:
            yield from self._meet()
        yield send(), self._data if large else ARRIVAL

    def _small_allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        if source.address != target.address:  # another rank may reduce in place, and then all must
            self._copy(source, target)
        yield self._comm.Iallreduce(self._mpi.IN_PLACE, self._reduced(target), self._op(op, source.dtype)), ARRIVAL

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
        yield from self._meet(two, ready or (self._persists and kept >= PERSIST_AFTER), kept.number if ready else 0)
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
                request = self._comm.Allreduce_init(*memory, self._op(op, source.dtype))
                kept = _Persistent(self._made, request)
                request.Start()
            else:
                request = self._comm.Iallreduce(*memory, self._op(op, source.dtype))
                kept = kept if ready else kept + 1
        self._requests[key] = kept
        self._forget(REMEMBERED)
        yield request, self._data

    def _reduce_ourselves(self, source: Buffer, target: Buffer, op: ReduceOp) -> Iterator[Step]:
        """Run an allreduce with ddl's kernels: each rank reduces one part, and then all ranks gather the parts.

        This way sends as many bytes as a ring. Sums of 16-bit floats are rounded once, and no NaN is lost.
        """
        size, large = self.context.size, source.nbytes >= LARGE_BYTES
        counts = [source.count // size + (rank < source.count % size) for rank in range(size)]
        mine = target.address + sum(counts[: self.context.rank]) * target.dtype.itemsize
        yield from self._scatter_ourselves(source, mine, counts, op, large)
        yield self._gather(self._mpi.IN_PLACE, target, counts), self._data if large else ARRIVAL

    def _scatter_ourselves(
        self, source: Buffer, target: int, counts: Sequence[int], op: ReduceOp, large: bool
    ) -> Iterator[Step]:
        if source.device.kind != "cpu":
            raise TransportError(f"mpi: {source.dtype.label} on {source.device} cannot be reduced; copy it to the host")
        size, mine, width = self.context.size, counts[self.context.rank], source.dtype.itemsize
        parts = self._temporary_of("parts", size * mine, source.dtype)
        send = lambda: self._exchange(source, parts, [counts] * size)  # noqa: E731
        yield from self._moving(send, large)
        addresses = [parts.address + rank * mine * width for rank in range(size)]
        if mine:
            self.context.kernels.reduce(addresses, target, mine, source.dtype, op)

    # --- arguments for MPI

    def _gather(self, source: Any, target: Buffer, counts: Sequence[int]) -> Any:
        return self._comm.Iallgatherv(source, self._laid_out(target, counts))

    def _exchange(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Any:
        rank = self.context.rank
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

    def _op(self, op: ReduceOp, dtype: DType) -> Any:
        return (self._bool_ops if dtype is DType.BOOL else self._ops)[op]

    # --- shared

    def _begin(self, steps: Iterator[Step], *memory: Buffer) -> Work:
        dense(*memory)
        self._check()
        if self._comm is None:
            raise TransportError(f"mpi: {self._name()} is not open")
        self._under_way = memory or steps
        return Steps(steps, self._check, self._failure, self._ended)

    def _ended(self) -> None:
        self._under_way = None

    def _check(self) -> None:
        if self._aborted:
            raise TransportError(f"mpi: {self._name()} was aborted")

    def _failure(self, error: Exception) -> Exception:
        """Convert an error of MPI to an error of ddl. No other function does so."""
        if isinstance(error, DdlInternalError):
            return error
        return TransportError(f"mpi: {self._name()}: {error}")

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"

    def _forget(self, limit: int) -> None:
        """Remove the oldest entries of ``_requests`` until ``limit`` entries remain. Free their persistent requests."""
        while len(self._requests) > limit:
            _, kept = self._requests.popitem(last=False)
            if isinstance(kept, _Persistent):
                kept.request.Free()

    def _temporary_of(self, use: str, count: int, dtype: DType) -> Buffer:
        """Return temporary memory for ``count`` elements.

        The next call with the same ``use`` returns the same memory, if the memory is large enough.
        """
        nbytes = count * dtype.itemsize
        memory = self._scratch.get(use)
        if memory is None or memory.nbytes < nbytes:
            memory = self._scratch[use] = self.allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _is_ours(source: Buffer, op: ReduceOp) -> bool:
    """Return whether ddl's kernels, and not MPI, must reduce ``source`` by ``op``.

    The kernels can only reduce host memory. There are two reasons not to use MPI. MPI adds 16-bit floats in 16 bits.
    And MPI finds the minimum or maximum of floats by comparisons, so with a NaN each rank may get a different result.
    """
    chosen = op in ORDERED and source.dtype.is_float and source.device.kind == "cpu"
    return chosen or source.dtype in SIXTEEN_BITS


def _looked_up(mpi: Any, names: Mapping[K, str]) -> dict[K, Any]:
    return {key: getattr(mpi, name) for key, name in names.items()}
