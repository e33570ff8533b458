"""The transport over shared memory. Each collective is one call of machine code.

This module decides at which offsets of the shared segment the counters and the ranks' rings of slots are. It also makes
the tables that the machine code reads.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ddl_shm import segment
from ddl_shm.kernels import frame as at
from ddl_shm.machine_code import SHM
from ddlcore.contracts.machine_code.loading import load
from ddlcore.contracts.transport import (
    DONE,
    Capabilities,
    Context,
    Move,
    Plan,
    Prepared,
    PreparedMove,
    Transport,
    Work,
    dense,
)
from ddlcore.errors import TransportError
from ddlcore.types import Buffer, Kind, ReduceOp

CHUNK_BYTES = 64 << 10  # bytes of a slot: at most so many are exchanged in a round; for many ranks it is smaller
LEAST_CHUNK_BYTES = 32 << 10
MOST_CHUNK_BYTES = 1 << 20
RING_BYTES = 1 << 20  # bytes of a rank's slots: as much as a core's own caches hold, see docs/design/kernels.md
CROWDED_CHUNK_BYTES = 128 << 10  # if ranks share cores: larger rounds mean fewer switches between ranks
CROWDED_RING_BYTES = 512 << 10  # if ranks share cores, they share the caches too
SEGMENT_BYTES = 16 << 20  # approximate limit for all rings together
SMALL_BYTES = 32 << 10  # sum over all ranks: up to this size, each rank reduces all data itself, which saves a step
SPINS, YIELDS = 50, 40  # about 1 µs, then 15 µs in which others may use the core; more would slow a late peer
CROWDED_YIELDS = 100  # if ranks share cores, only a yield lets the peer run
SLEEP_NS = 50_000_000  # longest sleep; a sleeper that missed an abort's wake-up notices the abort then

NEVER = -1000  # the number of a round that is earlier than any real round
HERE, VOID, LATER = 1, 3, 4  # return codes: aborted by this rank; the bucket is void; not all ranks have arrived yet

Words = ctypes.Array[ctypes.c_int64]


class ShmTransport(Transport):
    """The transport for two or more ranks of one host.

    The ranks are processes, or threads of one process. Each rank opens its own instance of this class.
    """

    capabilities = Capabilities(
        one_host=True,
        vectored=True,
        scales=True,
        order_fixed=True,
        atomic=True,
        resumable=True,
        resumable_moves=True,
    )

    def __init__(self) -> None:
        self._segment: segment.Segment | None = None
        self._frame: Words | None = None
        self._frame_at = 0
        self.closed = True  # true also before ``open``
        self._lock = threading.Lock()  # abort() must not use the frame while close() frees it
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
        code = load(SHM, str(context.settings.get("cache_dir", "")))
        self._functions = {name: code.function(name) for name in SHM.functions}
        # Rank 0 decides the memory layout, because other ranks may see another number of cores.
        crowded = context.size > len(os.sched_getaffinity(0))
        if context.rank == 0:
            layout = ring_bytes(context.size, crowded, int(context.settings.get("shm_chunk_bytes", 0)))
            head = struct.pack(f"={at.LAYOUT}x2q", *layout)
            nbytes = _inputs_at(context.size) + (context.size + 1) * layout[1]
            peers = context.size - 1
            self._segment = segment.make(nbytes, peers, context.store, context.timeout_s, self._stop, head)
        else:
            self._segment = segment.receive(context.rank, context.store, context.timeout_s, self._stop)
        self._frame = _make_frame(context, self._segment, crowded)
        self._frame_at = ctypes.addressof(self._frame)
        self.closed = False

    def close(self) -> None:
        with self._lock:
            self.closed = True
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
        """Run the collective ``name``: call its machine code once, with the frame's address and ``arguments``.

        Raises TransportError if the communicator was aborted or is not open.
        """
        frame = self.frame_address(name)
        code = HERE if self._aborted else self._functions[f"ddl_{name}"](frame, *arguments)
        if code != 0:
            raise self.failure(code, name)
        return DONE

    def function(self, name: str) -> Callable[..., int]:
        return self._functions[name]

    def frame_address(self, name: str) -> int:
        """Return the address of the frame, which is the table of 64-bit words that all machine code needs.

        Raises TransportError if the communicator is not open. ``name`` is the name of the collective that needs the
        frame; the message contains it.
        """
        if self.closed:
            raise self.failure(0, name)
        return self._frame_at

    def failure(self, code: int, name: str) -> TransportError:
        """Return the error to raise after the machine code of the collective ``name`` has returned ``code``.

        If ``code`` is 0, the machine code was not called, because the communicator is not open.
        """
        if code == 0:
            return TransportError(f"shm: {self._name()} is not open")
        who = "here" if code == HERE else f"by rank {self._aborter()}"
        return TransportError(f"shm: {self._name()} was aborted {who} during {name}")

    def _stop(self) -> bool:
        return self._aborted

    def _aborter(self) -> int:
        """Return the rank that has aborted the communicator, numbered as in the world.

        The rank that aborts writes its number into the first word of the segment.
        """
        assert self._segment is not None
        mark = ctypes.c_int64.from_address(self._segment.address).value
        return self.context.members[mark - 1].rank

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"

    def prepare(self, plan: Plan) -> Prepared:
        return _PreparedBucket(self, plan)

    def prepare_move(self, move: Move) -> PreparedMove:
        return _ShmMove(self, move)

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        dense(source, target)
        plan = Plan((source.count,), source.dtype, op)
        return self.prepare(plan).start([source.address], [target.address])

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        dense(source, target)
        size = source.dtype.itemsize
        table = _table([count * size for count in counts])
        return self.run("gather", source.address, target.address, ctypes.addressof(table))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        table = (ctypes.c_int64 * self.context.size)()
        table[root] = buffer.nbytes
        return self.run("gather", buffer.address, buffer.address, ctypes.addressof(table))

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        dense(source, target)
        plan = _plan_words(Plan(tuple(counts), source.dtype, op), self._frame_at)
        return self.run("reducescatter", ctypes.addressof(plan), source.address, target.address)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        dense(source, target)
        size = source.dtype.itemsize
        table = _table([count * size for count in itertools.chain.from_iterable(counts)])
        return self.run("alltoall", source.address, target.address, ctypes.addressof(table))

    def barrier(self) -> Work:
        return self.run("barrier")


class _PreparedBucket(Prepared):
    """A prepared plan in the form that the machine code reads: a table of words, and two tables of addresses.

    One table contains the address of the source of each tensor, the other table the address of its target. The tables
    are written only when the addresses change.
    """

    def __init__(self, transport: ShmTransport, plan: Plan) -> None:
        self._transport = transport
        self._sources = (ctypes.c_int64 * len(plan.counts))()
        self._targets = (ctypes.c_int64 * len(plan.counts))()
        self._bound: tuple[list[int], list[int]] | None = None  # the addresses in the tables, if they came as lists
        frame = transport.frame_address("prepare")
        self._plan = _plan_words(plan, frame, ctypes.addressof(self._sources), ctypes.addressof(self._targets))
        self._plan_at = ctypes.addressof(self._plan)
        self._real: Callable[[int], int] = _unbound
        self._idle = transport.function("ddl_allreduce_idle")
        self._try = transport.function("ddl_allreduce_try")

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        self.bind(sources, targets)
        self.run_bound(True)
        return DONE

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        if real:
            self.bind(sources, targets)
        return self.run_bound(real)

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        if self._transport.closed:
            raise self._transport.failure(0, "allreduce")
        self.bind(sources, targets)
        self._plan[at.TICKET // 8] = ticket
        code = self._try(self._plan_at)
        if code == 0:
            return True
        if code == LATER:
            return None
        if code == VOID:
            return False
        raise self._transport.failure(code, "allreduce")

    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        lists = isinstance(sources, list) and isinstance(targets, list)  # only lists: == of arrays works by element
        if lists and self._bound is not None and sources == self._bound[0] and targets == self._bound[1]:
            return
        self._bound = None
        _fill(self._sources, sources)
        _fill(self._targets, targets)
        self._real = self._transport.function("ddl_allreduce")
        if lists:
            self._bound = (list(sources), list(targets))

    def run_bound(self, real: bool) -> bool:
        if self._transport.closed:  # the plan contains addresses of memory that has been unmapped
            raise self._transport.failure(0, "allreduce")
        code = (self._real if real else self._idle)(self._plan_at)
        if code == 0:
            return True
        if code == VOID:
            return False
        raise self._transport.failure(code, "allreduce")


class _ShmMove(PreparedMove):
    """A prepared move in the form that the machine code reads: a table of words. Each run writes its own words."""

    def __init__(self, transport: ShmTransport, move: Move) -> None:
        self._shm = transport
        self._name = move.kind.name.lower()
        size = transport.context.size
        counts = [0] * (size * size if move.kind is Kind.ALLTOALL else size)
        words = _plan_words(Plan(tuple(counts), move.dtype, move.op), transport.frame_address(self._name))
        words[at.TENSORS // 8] = _MOVES.get(move.kind, at.GATHER)
        self._plan, self._plan_at = words, ctypes.addressof(words)
        self._root = move.root if move.kind is Kind.BROADCAST else -1
        # Bytes, but a reducescatter counts elements.
        self._unit = 1 if move.kind is Kind.REDUCESCATTER else move.dtype.itemsize
        self._nested = move.kind is Kind.ALLTOALL
        self._counts: object = None  # those in the table
        self._function = transport.function("ddl_move")

    def run(self, source: Buffer, target: Buffer, counts: Sequence[int] | Sequence[Sequence[int]], ticket: int) -> None:
        if self._shm.closed:  # the plan contains addresses of memory that has been unmapped
            raise self._shm.failure(0, self._name)
        dense(source, target)
        plan = self._plan
        if self._root >= 0:
            plan[at.COUNTS // 8 + self._root] = target.nbytes
        elif counts is not self._counts:
            self._write(counts)
        plan[at.SOURCES // 8] = source.address
        plan[at.TARGETS // 8] = target.address
        plan[at.TICKET // 8] = ticket
        code = self._function(self._plan_at)
        if code != 0:
            raise self._shm.failure(code, self._name)

    def _write(self, counts: Sequence[Any]) -> None:
        flat = list(itertools.chain.from_iterable(counts)) if self._nested else counts
        self._counts = None
        self._plan[at.COUNTS // 8 :] = [int(count) * self._unit for count in flat]
        self._plan[at.TOTAL // 8] = sum(flat)  # only a reducescatter reads it
        self._counts = counts if isinstance(counts, tuple) else None  # a list may change


_MOVES = {Kind.ALLTOALL: at.ALLTOALL, Kind.REDUCESCATTER: at.REDUCESCATTER}  # all others are gathers


def _unbound(plan: int) -> int:
    raise TransportError("shm: a plan was run before bind() gave it addresses; please report this")


def _fill(table: Words, addresses: Sequence[int]) -> None:
    try:
        table[:] = addresses  # type: ignore[call-overload]  # any sequence works, not only a list
    except TypeError:  # ctypes does not accept numpy's integers
        table[:] = [int(address) for address in addresses]


def ring_bytes(size: int, crowded: bool, wanted: int = 0) -> tuple[int, int]:
    """Return (bytes of a slot, bytes of a ring) for ``size`` ranks. Both numbers are powers of two.

    The rings are so small that all rings together have about SEGMENT_BYTES at most. ``crowded`` is true if there are
    more ranks than cores. ``wanted`` is the slot size in bytes that a user or a tuner has chosen; 0 if none was chosen.
    """
    chunk, ring = (CROWDED_CHUNK_BYTES, CROWDED_RING_BYTES) if crowded else (CHUNK_BYTES, RING_BYTES)
    if wanted > 0:
        chunk = 1 << (min(max(wanted, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES).bit_length() - 1)
        ring = max(ring, at.LEAST_SLOTS * chunk)
    ring = min(ring, 1 << ((SEGMENT_BYTES // size).bit_length() - 1))
    chunk = max(LEAST_CHUNK_BYTES, min(chunk, ring // at.LEAST_SLOTS))
    return chunk, max(at.LEAST_SLOTS * chunk, min(ring, at.MOST_SLOTS * chunk))


def _inputs_at(size: int) -> int:
    """Return the offset in bytes at which the rings begin in the segment.

    The segment begins with the cache lines that contain the counters of ``size`` ranks. The rings begin at the next
    page.
    """
    return _round_up(at.LINE * (1 + size), 4096)


def _make_frame(context: Context, memory: segment.Segment, crowded: bool) -> Words:
    """Return the frame of this rank, which is the table of 64-bit words that the machine code reads and writes.

    ``memory`` is the shared segment. ``crowded`` is true if there are more ranks than cores.
    """
    chunk, ring = (ctypes.c_int64 * 2).from_address(memory.address + at.LAYOUT)
    inputs = memory.address + _inputs_at(context.size)
    results = inputs + context.size * ring
    if results + ring != memory.address + memory.nbytes:
        raise TransportError("shm: rank 0 uses another memory layout; do all ranks run the same version of ddl?")
    words = (ctypes.c_int64 * (at.TABLE // 8 + context.size))()
    values = {
        at.RANK: context.rank,
        at.SIZE: context.size,
        at.HEADER: memory.address,
        at.INPUTS: inputs,
        at.RESULTS: results,
        at.CHUNK: chunk,
        at.RING: ring,
        at.SMALL: SMALL_BYTES // context.size,
        at.SPINS: 0 if crowded else SPINS,  # if ranks share cores, a rank that spins delays the peer it waits for
        at.YIELDS: CROWDED_YIELDS if crowded else YIELDS,
        at.TIMEOUT + 8: SLEEP_NS,
    }
    for offset, value in values.items():
        words[offset // 8] = value
    for i in range(at.LAST // 8, at.PLACES // 8):
        words[i] = NEVER
    return words


def _plan_words(plan: Plan, frame: int, sources: int = 0, targets: int = 0) -> Words:
    """Return ``plan`` as a table of 64-bit words, in the form that the machine code reads.

    ``frame`` is the address of the frame. ``sources`` and ``targets`` are the addresses of the two tables that contain
    the addresses of the tensors; 0 if there are no such tables.
    """
    scales = struct.unpack("=2q", struct.pack("=2d", plan.prescale, plan.postscale))
    facts = (len(plan.counts), plan.dtype, plan.op, sum(plan.counts), *scales, sources, targets, frame, 0, -1, 0)
    return _table([*facts, *plan.counts])


def _table(values: Sequence[int]) -> Words:
    return (ctypes.c_int64 * len(values))(*values)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
