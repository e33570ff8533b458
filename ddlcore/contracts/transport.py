"""The transport contract: one communicator for one group of ranks, from open to close.

The rules:

* One call at a time, in the same order on every rank. Calls come from one thread at a time; if
  ``capabilities.thread_bound``, they come from the same thread that called ``open``. Only ``abort`` may come from any
  thread at any moment: it returns within 1 s, and makes a pending call or Work raise.
* Memory is dense: the elements of a buffer fill ``nbytes`` bytes from ``address`` on, in any order of the axes. A
  buffer with gaps is refused with ValueError before anything is sent: each collective begins with ``dense(source,
  target)``.
* Every member passes sizes that match: all counts are given, those sent *and* those received. A transport never
  exchanges sizes. A length of zero is always allowed.
* A ``Work`` is complete when the call returns (``DONE``), or after ``wait``, which has a timeout.
* If ``capabilities.stream_ordered``, addresses are of memory of the device of ``context.queue`` (or of pinned host
  memory). A call enqueues its work on that queue and returns ``DONE``, which then means only that this rank has
  enqueued it. The transport itself keeps alive whatever else the work needs. Calls still come from one thread.
* Buffers belong to the executor until the Work is done or the transport is aborted.
* One function maps foreign errors to TransportError, with the foreign error as the cause. A slow peer is not a dead
  one: a transport disables its own timeouts, because the control network decides which rank is lost.
* Averaging, scaling, casting, carrying types and fusion are done by the executor, unless the capabilities say that the
  transport does them.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddlcore.contracts.device import Queue
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.memory import Memory, view
from ddlcore.contracts.store import Store
from ddlcore.types import Buffer, DType, Kind, Member, ReduceOp

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
    """What a transport can do, as data.

    It is checked once, when a route is chosen, and logged with the reason for the choice.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[DType] = (
        ALL_DTYPES  # types that it reduces; 16-bit floats are added in float32 and rounded once (host_first: twice)
    )
    ops: frozenset[ReduceOp] = ALL_OPS  # with Average, the transport divides sums of floats by the number of ranks
    one_host: bool = False  # serves only members that share a host
    vectored: bool = False  # prepare() takes a bucket as a table of pointers, so no fusion copy is needed
    scales: bool = False  # the transport itself pre- and postscales vectored plans
    atomic: bool = False  # vectored plans can run as an atomic allreduce, see Prepared.run_atomic
    resumable: bool = False  # atomic runs may be split into tries, on a user thread: Prepared.try_run_atomic
    order_fixed: bool = False  # adds in rank order, independent of the bucket: bitwise reproducible
    host_first: bool = False  # adds within each host first, then adds the hosts' sums in order of their first ranks
    thread_bound: bool = False
    abort: bool = True  # False: a pending call cannot be interrupted; the job exits without waiting for it
    stream_ordered: bool = False  # calls enqueue on ``Context.queue`` and return; later work on it runs after them


@dataclass(frozen=True)
class Context:
    """Everything that a transport gets from its surroundings."""

    rank: int  # in this communicator
    members: tuple[Member, ...]  # by rank in this communicator
    store: Store  # the part of it that belongs to this communicator
    kernels: Kernels
    settings: Mapping[str, str | int | float | bool]  # the plugin's own settings and the core's
    timeout_s: float  # for open
    name: str = ""  # of the communicator, for messages
    address: str = ""  # this host's address on the route to the launcher; "" if all ranks are on one host
    queue: Queue | None = None  # of the device that this communicator serves; None if it serves host memory

    @property
    def size(self) -> int:
        return len(self.members)


class Work(ABC):
    """A collective that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the collective is complete, and return True; return False if ``timeout_s`` passed first.

        Raises the transport's errors.
        """


class _Done(Work):
    def wait(self, timeout_s: float) -> bool:
        return True


DONE: Work = _Done()


@dataclass(frozen=True)
class Plan:
    """An allreduce of several tensors of one type, described before their addresses are known."""

    counts: tuple[int, ...]  # elements of each tensor
    dtype: DType
    op: ReduceOp  # SUM, MIN, MAX or PRODUCT
    prescale: float = 1.0  # 1 unless capabilities.scales
    postscale: float = 1.0  # likewise; it includes the division for an average
    kind: Kind = Kind.ALLREDUCE


class Prepared(ABC):
    """A plan that can be run repeatedly; only the addresses change."""

    @abstractmethod
    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        """Start the plan with these addresses.

        ``sources[i]`` and ``targets[i]`` have ``plan.counts[i]`` elements each, and are either the same address or
        disjoint.
        """

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        """Run the plan to its end, all or nothing, and return True if every rank passed real data.

        If some rank passes ``real`` False (its addresses are never followed), nothing is written on any rank, and all
        ranks return False. Called only if ``capabilities.atomic``, and for at least one element.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot run atomically")

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        """Try for about 0.1 s to do ``run_atomic`` with real data; return None if not all ranks have arrived by then.

        Called only if ``capabilities.resumable``. Nothing else may be called on the communicator until a try with this
        ticket, from any one thread at a time, has returned True or False. After that, a call with the same ticket
        returns the same result again and does nothing, so that a caller that was interrupted can ask how the run ended.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be run in several tries")

    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Set the addresses that ``run_bound`` uses; they stay until the next ``bind`` or ``run_atomic``.

        It is cheap if the addresses are the same as before. The caller keeps the owners of the memory alive.
        """
        self._addresses = (list(sources), list(targets))

    def run_bound(self, real: bool) -> bool:
        """Do ``run_atomic`` with the bound addresses. With ``real`` False it also works if nothing has been bound."""
        sources, targets = getattr(self, "_addresses", ([], []))
        return self.run_atomic(sources, targets, real)


def dense(*buffers: Buffer) -> None:
    """Refuse buffers with gaps between their elements, which an address and a count cannot describe.

    Raises ValueError, with the shape and the strides.
    """
    for buffer in buffers:
        if buffer.strides is not None and not buffer.is_dense:
            raise ValueError(
                f"a {buffer.dtype.label} buffer of shape {buffer.shape} and strides {buffer.strides} leaves gaps in "
                "memory, and transports move whole memory; pass a contiguous copy"
            )


class Transport(ABC):
    """The base class of transports.

    A transport implements ``open``, ``close``, ``allreduce``, ``allgatherv`` and ``broadcast``; the other collectives
    are derived from them. A stream-ordered transport also implements ``reducescatterv`` and ``alltoallv`` itself; its
    ``barrier`` is never called.
    """

    capabilities: Capabilities = Capabilities()

    def capabilities_for(self, kind: Kind) -> Capabilities:
        """Return the capabilities for one kind of operation. Override it if kinds differ; the result is known before
        ``open``.
        """
        return self.capabilities

    @abstractmethod
    def open(self, context: Context) -> None:
        """Meet the other members; all of them call it. Raises DeadlineExceeded after ``context.timeout_s`` seconds."""
        self.context = context

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        """Take part while other ranks open their instances of this transport; it replaces ``open`` on this instance.

        If the provider is ``attended``, every rank of a composed communicator calls this, on an instance of its own.
        ``context.members`` are all ranks of the composed communicator. Some of them open further instances of this
        transport; those ranks call this afterwards. ``check`` raises to end the wait. Only ``abort`` and ``close`` may
        follow. Raises DeadlineExceeded after ``context.timeout_s`` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything.

        Calling it again has no effect; no collective is pending, and peers may already have exited.
        """

    def abort(self) -> None:
        """Make everything that is pending raise now. Any thread may call it; only ``close`` may follow."""

    def check_queued(self) -> None:
        """Raise if work that earlier calls have enqueued has been aborted after these calls returned.

        It returns at once; any thread may call it.
        """

    @abstractmethod
    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        """Reduce: target = source of rank 0 op … op source of the last rank.

        Source and target are the same memory or disjoint.
        """

    @abstractmethod
    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        """Gather: target = every rank's source, one after the other; ``counts[r]`` elements come from rank r."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work:
        """Copy the buffer of ``root``, a rank of this communicator, to all ranks."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        """Write this rank's part of the reduction of ``source`` to ``target``; rank r gets ``counts[r]`` elements."""
        dense(source, target)
        whole = self._temporary(source.count, source.dtype)
        _finish(self.allreduce(source, whole, op), self.context)
        size = source.dtype.itemsize
        ctypes.memmove(target.address, whole.address + sum(counts[: self.context.rank]) * size, target.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        """Send ``counts[s][d]`` elements from each rank s to each rank d.

        In both buffers, the parts for or from the ranks lie one after the other, by rank.
        """
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
        """Wait for all ranks: the work completes on no rank before every rank has called it."""
        one = self._temporary(1, DType.U8)
        return self.allreduce(one, one, ReduceOp.Max)

    def allocate(self, nbytes: int) -> Memory:
        """Return memory from which this transport can send efficiently."""
        queue = self.context.queue
        return Memory(nbytes) if queue is None else queue.runtime.allocate(nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        """Prepare a plan. Called only if ``capabilities.vectored``."""
        raise NotImplementedError(f"{type(self).__name__} is not vectored")

    def _temporary(self, count: int, dtype: DType) -> Buffer:
        if self.capabilities.stream_ordered:
            raise NotImplementedError(f"{type(self).__name__} is stream-ordered, and must write this operation itself")
        memory = Memory(count * dtype.itemsize)
        return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _finish(work: Work, context: Context) -> None:
    while not work.wait(context.timeout_s):
        pass  # no deadline, because a slow peer is not a dead one: abort() ends this wait
