"""The transport over shared memory: lays out the segment and the tables, then one call of machine code a collective."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence

from ddlcore.builtin.shm import segment
from ddlcore.contracts.transport import DONE, Capabilities, Context, Plan, Prepared, Transport, Work
from ddlcore.errors import TransportError
from ddlcore.kernels import frame as at
from ddlcore.kernels.code import FUNCTIONS, load
from ddlcore.types import Buffer, ReduceOp

__all__ = ["ShmTransport", "chunk_bytes"]

CHUNK_BYTES = 128 << 10  # a slot that stays in the second-level cache; smaller for many ranks
LEAST_CHUNK_BYTES = 32 << 10
SEGMENT_BYTES = 16 << 20  # about what all slots together take for many ranks
SMALL_BYTES = 32 << 10  # over all ranks: up to here each rank reduces everything, one step less
SPINS, YIELDS = 50, 100  # about 1 µs, for a peer that runs; then tens of µs that others of this core may use
SLEEP_NS = 50_000_000  # how soon a sleeper notices an abort that nobody woke it for

Words = ctypes.Array[ctypes.c_int64]


class ShmTransport(Transport):
    """2 or more ranks of one host, as processes or as threads that each open one."""

    capabilities = Capabilities(one_host=True, vectored=True, scales=True, order_fixed=True, entry=True)

    def __init__(self) -> None:
        self._segment: segment.Segment | None = None
        self._frame: Words | None = None
        self._lock = threading.Lock()  # abort() against close()
        self._aborted = False
        self._functions: dict[str, Callable[..., int]] = {}

    def open(self, context: Context) -> None:
        if sys.platform != "linux":
            raise TransportError(f"shm is for Linux, this is {sys.platform}; use --backend threads or another one")
        super().open(context)
        hosts = {member.host for member in context.members}
        if len(hosts) > 1:
            raise TransportError(
                f"shm: the ranks of {context.name} are on {len(hosts)} hosts; choose another --backend"
            )
        code = load(str(context.settings.get("cache_dir", "")))
        self._functions = {name: code.function(name) for name in FUNCTIONS}
        chunk = chunk_bytes(context.size)
        header = at.LINE * (1 + context.size)
        slots = _round_up(header, 4096)
        results = slots + context.size * at.SLOTS * chunk
        nbytes = results + at.SLOTS * chunk
        if context.rank == 0:
            self._segment = segment.make(nbytes, context.size - 1, context.store, context.timeout_s, self._stop)
        else:
            self._segment = segment.receive(context.rank, context.store, context.timeout_s, self._stop)
        if self._segment.nbytes != nbytes:
            raise TransportError("shm: rank 0 laid the memory out differently; do all ranks run the same version?")
        self._frame = self._make_frame(context, self._segment.address, slots, results, chunk)
        self._frame_at = ctypes.addressof(self._frame)

    def _make_frame(self, context: Context, base: int, slots: int, results: int, chunk: int) -> Words:
        words = (ctypes.c_int64 * (at.TABLE // 8 + context.size))()
        crowded = context.size > len(os.sched_getaffinity(0))
        values = {
            at.RANK: context.rank,
            at.SIZE: context.size,
            at.HEADER: base,
            at.SLOTS_AT: base + slots,
            at.RESULTS: base + results,
            at.CHUNK: chunk,
            at.SMALL: SMALL_BYTES // context.size,
            at.SPINS: 0 if crowded else SPINS,  # who spins where ranks share cores, holds up whom it waits for
            at.YIELDS: YIELDS,
            at.TIMEOUT + 8: SLEEP_NS,
        }
        for offset, value in values.items():
            words[offset // 8] = value
        return words

    def close(self) -> None:
        with self._lock:
            self._frame = None
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            if self._frame is not None:
                self._functions["ddl_abort"](self._frame_at)

    def run(self, name: str, *arguments: int) -> Work:
        """One call of machine code. Raises TransportError when the communicator was aborted."""
        self.call(name, *arguments)
        return DONE

    def call(self, name: str, *arguments: int) -> bool:
        """As ``run``; False if the batch was void."""
        if self._frame is None:
            raise TransportError(f"shm: {self._name()} is not open")
        code = 1 if self._aborted else self._functions[name](self._frame_at, *arguments)
        if code in (1, 2):
            who = "here" if code == 1 else f"by rank {self._aborter()}"
            raise TransportError(f"shm: {self._name()} was aborted {who} during {name.removeprefix('ddl_')}")
        return code == 0

    def _stop(self) -> bool:
        return self._aborted

    def _aborter(self) -> int:
        """The rank (of the world) that left its mark in the segment."""
        assert self._segment is not None
        mark = ctypes.c_int64.from_address(self._segment.address).value
        return self.context.members[mark - 1].rank

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"

    def prepare(self, plan: Plan) -> Prepared:
        return _PreparedBatch(self, plan)

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        plan = Plan((source.count,), source.dtype, op)
        return self.prepare(plan).start([source.address], [target.address])

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        size = source.dtype.itemsize
        table = _table([count * size for count in counts])
        return self.run("ddl_gather", source.address, target.address, ctypes.addressof(table))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        table = (ctypes.c_int64 * self.context.size)()
        table[root] = buffer.nbytes
        return self.run("ddl_gather", buffer.address, buffer.address, ctypes.addressof(table))

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        plan = _plan_words(Plan(tuple(counts), source.dtype, op))
        return self.run("ddl_reducescatter", ctypes.addressof(plan), source.address, target.address)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        size = source.dtype.itemsize
        table = _table([count * size for count in itertools.chain.from_iterable(counts)])
        return self.run("ddl_alltoall", source.address, target.address, ctypes.addressof(table))

    def barrier(self) -> Work:
        return self.run("ddl_barrier")


class _PreparedBatch(Prepared):
    """A plan's words, and two tables that every start fills with addresses."""

    def __init__(self, transport: ShmTransport, plan: Plan) -> None:
        self._transport = transport
        self._sources = (ctypes.c_int64 * len(plan.counts))()
        self._targets = (ctypes.c_int64 * len(plan.counts))()
        self._plan = _plan_words(plan, ctypes.addressof(self._sources), ctypes.addressof(self._targets))
        self._plan_at = ctypes.addressof(self._plan)

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        self._fill(sources, targets)
        return self._transport.run("ddl_allreduce", self._plan_at, 0)

    def enter(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        if real:
            self._fill(sources, targets)
        return self._transport.call("ddl_allreduce", self._plan_at, int(not real))

    def _fill(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        try:
            self._sources[:] = sources  # type: ignore[call-overload]  # any sequence will do, not lists only
            self._targets[:] = targets  # type: ignore[call-overload]  # likewise
        except TypeError:  # numpy's integers are not what ctypes takes
            self._sources[:] = [int(address) for address in sources]
            self._targets[:] = [int(address) for address in targets]


def chunk_bytes(size: int) -> int:
    """The size of a slot for so many ranks: a power of two, so that all slots stay moderate together."""
    fair = SEGMENT_BYTES // (at.SLOTS * size)
    return max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, 1 << (fair.bit_length() - 1)))


def _plan_words(plan: Plan, sources: int = 0, targets: int = 0) -> Words:
    """A plan as the machine code reads it; ``sources`` and ``targets`` are where its tables of addresses lie."""
    scales = struct.unpack("=2q", struct.pack("=2d", plan.prescale, plan.postscale))
    facts = (len(plan.counts), plan.dtype, plan.op, sum(plan.counts), *scales, sources, targets)
    return _table([*facts, *plan.counts])


def _table(values: Sequence[int]) -> Words:
    return (ctypes.c_int64 * len(values))(*values)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
