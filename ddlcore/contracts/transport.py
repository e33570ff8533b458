"""The transport contract: one communicator for one group of ranks, from open to close.

The rules, said once:

* One call at a time, in the same order on every rank. Calls come from one thread at a time; where
  ``capabilities.thread_bound``, from the very thread that called ``open``. ``abort`` alone may come
  from any thread, at any moment: it returns within 1 s and makes a pending call or Work raise.
* Memory is dense: a buffer's elements fill ``nbytes`` from ``address`` on, in whatever order of the axes. One with
  gaps is refused by ValueError before anything is sent: each collective begins with ``dense(source, target)``.
* Every member passes sizes that fit: counts, sent *and* received, are given. A transport never
  exchanges sizes. Zero length is legal everywhere.
* A ``Work`` is complete on return (``DONE``), or by ``wait``, which has a deadline.
* Where ``capabilities.stream_ordered``, the addresses are of the memory of ``context.queue``'s device (or of
  pinned host memory), a call puts its work on that queue and returns ``DONE``: it means queued, by this rank
  alone. What the call needs besides, it keeps alive itself. Calls still come from one thread.
* Buffers belong to the executor until the Work is done or the transport aborted.
* Foreign errors are mapped in one function, to TransportError with its cause. A slow peer is not a
  dead one: a transport's own timeouts are out of the way, loss is decided by the control network.
* Averaging, scaling, casting, carrying types and fusion are the executor's business, unless the
  capabilities say that the transport does it itself.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import Store
from ddlcore.types import Buffer, DType, Kind, Member, ReduceOp

if TYPE_CHECKING:
    from ddlcore.contracts.device import Queue

__all__ = [
    "DONE",
    "Capabilities",
    "Context",
    "Memory",
    "Plan",
    "Prepared",
    "Transport",
    "Work",
    "dense",
    "view",
]

ALL_DTYPES = frozenset(DType)
ALL_OPS = frozenset({ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product})


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, as data: checked once, when a route is chosen, and logged with the reason."""

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[DType] = (
        ALL_DTYPES  # that it reduces; 16-bit floats: in float32, rounded once (host_first: twice)
    )
    ops: frozenset[ReduceOp] = ALL_OPS  # with Average among them, of floats: it divides by the number of ranks itself
    one_host: bool = False  # serves only members that share a host
    vectored: bool = False  # prepare() takes a bucket as a table of pointers, no fusion copy needed
    scales: bool = False  # vectored plans are pre- and postscaled by the transport itself
    atomic: bool = False  # vectored plans can be entered all or nothing, see Prepared.enter
    resumable: bool = False  # and in several tries, so that a user's own thread may do it, see Prepared.try_run_atomic
    order_fixed: bool = False  # addition is in rank order, whatever the bucket: the same bits every time
    host_first: bool = False  # adds within each host first, then the hosts' sums in order of their first ranks
    thread_bound: bool = False
    abort: bool = True  # False: a pending call cannot be ended from outside; the job exits past it
    stream_ordered: bool = False  # calls are put on ``Context.queue`` and return; what follows on it comes after them


@dataclass(frozen=True)
class Context:
    """All that a transport gets from its surroundings."""

    rank: int  # in this communicator
    members: tuple[Member, ...]  # by rank in this communicator
    store: Store  # this communicator's own part of it
    kernels: Kernels
    settings: Mapping[str, str | int | float | bool]  # the plugin's own rows and the core's
    timeout_s: float  # for open
    name: str = ""  # of the communicator, for messages
    address: str = ""  # this host's own, on the route to the launcher; "" where all ranks are on one host
    queue: Queue | None = None  # of the device that this communicator serves; None: it serves host memory

    @property
    def size(self) -> int:
        return len(self.members)


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """True when it is complete; False when ``timeout_s`` passed first. Raises what the transport raises."""


class _Done(Work):
    def wait(self, timeout_s: float) -> bool:
        return True


DONE: Work = _Done()


@dataclass(frozen=True)
class Plan:
    """An allreduce of several tensors of one type, known before their addresses are."""

    counts: tuple[int, ...]  # elements of each tensor
    dtype: DType
    op: ReduceOp  # SUM, MIN, MAX or PRODUCT
    prescale: float = 1.0  # only where capabilities.scales, else 1
    postscale: float = 1.0  # likewise; averaging is already in it
    kind: Kind = Kind.ALLREDUCE


class Prepared(ABC):
    """A plan that is ready to run again and again; only addresses change."""

    @abstractmethod
    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        """Runs it: ``sources[i]`` and ``targets[i]`` (the same address, or disjoint) have ``plan.counts[i]`` elements."""

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        """As ``start`` to its end, all or nothing: True when every rank came with real data.

        Only where ``capabilities.atomic``, and for at least one element. If some rank passed ``real``
        False (its addresses are never followed), nothing is written on any rank, and all return False.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot run atomically")

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        """As ``run_atomic`` with real data, in tries of about 0.1 s: None, while not all have come.

        Only where ``capabilities.resumable``. Nothing else may be called on the communicator until a try with this
        ticket, from any one thread at a time, has returned True or False. After that, until the next
        ticket, it returns the same again and does nothing: who was interrupted may ask how it ended.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be run in several tries")

    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Names the memory of ``run_bound``, as ``start`` does: it stays so until the next ``bind`` or ``run_atomic``.

        Costs little where the addresses are those of the time before. Who calls keeps their owners alive.
        """
        self._addresses = (list(sources), list(targets))

    def run_bound(self, real: bool) -> bool:
        """As ``run_atomic``, with what was bound; dummy (``real`` False) also where nothing was."""
        sources, targets = getattr(self, "_addresses", ([], []))
        return self.run_atomic(sources, targets, real)


LARGE_BYTES = 1 << 20


class Memory:
    """Bytes that a transport likes to send from; here plain process memory, whose content is undefined."""

    def __init__(self, nbytes: int) -> None:
        self._bytes: object
        if nbytes < LARGE_BYTES:
            self._bytes = small = (ctypes.c_char * (nbytes + 64))()
            start = ctypes.addressof(small)
        else:  # numpy asks for huge pages, and touches none: a fifth of the time for 64 MiB
            import numpy as np

            self._bytes = large = np.empty(nbytes + 64, np.uint8)
            start = large.ctypes.data
        self.address = (start + 63) & ~63  # cache-line aligned
        self.nbytes = nbytes


def view(address: int, nbytes: int) -> memoryview:
    """The writable bytes at ``address``, without a copy. The caller keeps their owner alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(bytearray())


def dense(*buffers: Buffer) -> None:
    """Refuses memory that address and count do not describe. Raises ValueError, which says the shape and the strides."""
    for buffer in buffers:
        if buffer.strides is not None and not buffer.is_dense:
            raise ValueError(
                f"a {buffer.dtype.label} buffer of shape {buffer.shape} and strides {buffer.strides} leaves gaps in "
                "memory, and transports move whole memory; pass a contiguous copy"
            )


class Transport(ABC):
    """To write: ``open``, ``close``, ``allreduce``, ``allgatherv``, ``broadcast``; the rest is derived from them.

    A stream-ordered transport writes ``reducescatterv`` and ``alltoallv`` itself; its ``barrier`` is never called.
    """

    capabilities: Capabilities = Capabilities()

    def capabilities_for(self, kind: Kind) -> Capabilities:
        """Of one kind of operation, where kinds differ; known from the beginning."""
        return self.capabilities

    @abstractmethod
    def open(self, context: Context) -> None:
        """Meets the other members; all of them call it. Raises DeadlineExceeded past ``context.timeout_s``."""
        self.context = context

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        """On every rank of a composed communicator, in place of ``open``, where the provider is ``attended``.

        ``context.members`` are all its ranks. Some of them open others of this kind; they attend after that.
        ``check`` raises to end the wait. Only ``abort`` and ``close`` may follow. Raises DeadlineExceeded
        past ``context.timeout_s``.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything; idempotent; no collective is pending. Peers may be gone already."""

    def abort(self) -> None:
        """Makes whatever is pending raise, now and from any thread. Only ``close`` may follow."""

    def check_queued(self) -> None:
        """Raises where calls that have returned were broken off since, as on a queue they may be. At once; any thread."""

    @abstractmethod
    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        """target = source of rank 0 op … op source of the last; the two are one memory or disjoint."""

    @abstractmethod
    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        """target = every rank's source, one behind the other; ``counts[r]`` elements come from rank r."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work:
        """buffer = that of ``root``, a rank of this communicator."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        """target = this rank's part of the reduction of ``source``; rank r gets ``counts[r]`` elements."""
        dense(source, target)
        whole = self._temporary(source.count, source.dtype)
        _finish(self.allreduce(source, whole, op), self.context)
        size = source.dtype.itemsize
        ctypes.memmove(target.address, whole.address + sum(counts[: self.context.rank]) * size, target.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        """Rank s sends ``counts[s][d]`` elements to rank d; both sides lie one behind the other, by rank."""
        dense(source, target)
        me, size = self.context.rank, source.dtype.itemsize
        sent = [sum(row) for row in counts]
        everything = self._temporary(sum(sent), source.dtype)
        _finish(self.allgatherv(source, everything, sent), self.context)
        to = target.address
        for s, row in enumerate(counts):
            at = everything.address + (sum(sent[:s]) + sum(row[:me])) * size
            ctypes.memmove(to, at, row[me] * size)
            to += row[me] * size
        return DONE

    def barrier(self) -> Work:
        """Complete on no rank before every rank has called it."""
        one = self._temporary(1, DType.U8)
        return self.allreduce(one, one, ReduceOp.Max)

    def allocate(self, nbytes: int) -> Memory:
        """Memory that this transport likes to send from."""
        queue = self.context.queue
        return Memory(nbytes) if queue is None else queue.runtime.allocate(nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        """Only where ``capabilities.vectored``."""
        raise NotImplementedError(f"{type(self).__name__} is not vectored")

    def _temporary(self, count: int, dtype: DType) -> Buffer:
        if self.capabilities.stream_ordered:
            raise NotImplementedError(f"{type(self).__name__} is stream-ordered, and must write this operation itself")
        memory = Memory(count * dtype.itemsize)
        return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _finish(work: Work, context: Context) -> None:
    while not work.wait(context.timeout_s):
        pass  # a slow peer is not a dead one: abort() ends this wait
