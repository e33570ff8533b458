"""The transport contract: one communicator for one group of ranks, from open to close.

The rules:

* The executor makes one call at a time, in the same order on every rank. Calls come from one thread at a time; if
  ``capabilities.thread_bound``, they come from the thread that called ``open``. Only ``abort`` may be called by any
  thread at any moment: it returns within 1 s, and makes a pending call or Work raise.
* Memory is dense: the elements of a buffer fill ``nbytes`` bytes from ``address`` on, in any order of the axes. A
  buffer with gaps is refused with ValueError before anything is sent: each collective begins with ``dense(source,
  target)``.
* Every member passes sizes that match: all counts are given, of what is sent *and* of what is received. A transport
  never exchanges sizes. A length of zero is always allowed.
* A ``Work`` is complete when the call returns (``DONE``), or after ``wait``, which has a timeout.
* If ``capabilities.stream_ordered``, addresses are in memory of the device of ``context.queue`` (or in pinned host
  memory). A call enqueues its work on that queue and returns ``DONE``, which then means only that this rank has
  enqueued the work. If the work needs other memory, the transport itself keeps that memory alive. Calls still come from
  one thread.
* Source and target of an allreduce, and of each tensor of a plan, are the same memory or disjoint. Those of
  ``allgatherv``, ``reducescatterv`` and ``alltoallv`` are always disjoint.
* Buffers belong to the executor, which keeps them until the Work is done or the transport is aborted.
* One function maps the errors of the library to TransportError, with the library's error as the cause. A peer that is
  slow is not lost: a transport disables its own timeouts, because the control network decides which rank is lost.
* The executor averages, scales, casts, encodes and fuses, unless the capabilities say that the transport does so.
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
    """A description of what a transport can do.

    It is read once, when a route is chosen, and logged with the reason for the choice.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[DType] = (
        ALL_DTYPES  # types that it reduces; it adds 16-bit floats in float32 and rounds once (host_first: twice)
    )
    ops: frozenset[ReduceOp] = ALL_OPS  # with Average, the transport divides sums of floats by the number of ranks
    one_host: bool = False  # it can connect only members that share a host
    vectored: bool = False  # prepare() takes the tensors of a bucket by their addresses, so no copy is needed
    scales: bool = False  # the transport itself applies ``prescale`` and ``postscale`` of vectored plans
    atomic: bool = False  # vectored plans can run as an atomic allreduce, see Prepared.run_atomic
    resumable: bool = False  # an atomic run may consist of several tries on a user thread: Prepared.try_run_atomic
    order_fixed: bool = False  # it adds in the order of the ranks, whatever the bucket: bitwise reproducible
    host_first: bool = False  # it adds within each host first, then the hosts' sums in the order of their first ranks
    thread_bound: bool = False
    abort: bool = True  # False: a pending call cannot be interrupted; the job exits without waiting for it
    stream_ordered: bool = False  # calls only enqueue work, on ``Context.queue``; later work on it comes after


@dataclass(frozen=True)
class Context:
    """The values that a transport gets when it opens."""

    rank: int  # this rank's number in this communicator
    members: tuple[Member, ...]  # in the order of their ranks in this communicator
    store: Store  # the part of the job's store that belongs to this communicator
    kernels: Kernels
    settings: Mapping[str, str | int | float | bool]  # the plugin's own settings and the core's
    timeout_s: float  # how long ``open`` may take
    name: str = ""  # name of the communicator, for messages
    address: str = ""  # this host's address on the route to the launcher; "" if all ranks are on one host
    queue: Queue | None = None  # queue of the communicator's device; None if it works on host memory

    @property
    def size(self) -> int:
        return len(self.members)


class Work(ABC):
    """A collective that has been started.

    The thread that started it calls ``wait`` again and again, each time for a part of a second, until it returns True or
    raises. Then nobody uses the Work any more. No other collective of the communicator is started meanwhile.
    """

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the collective is complete, and return True. Return False if ``timeout_s`` has passed first.

        Raises a TransportError if the collective has failed. After ``abort`` of the transport, it raises one within 1 s.
        """


class _Done(Work):
    def wait(self, timeout_s: float) -> bool:
        return True


DONE: Work = _Done()


@dataclass(frozen=True)
class Plan:
    """A description of an allreduce of several tensors of one type, made before their addresses are known."""

    counts: tuple[int, ...]  # number of elements of each tensor
    dtype: DType
    op: ReduceOp  # SUM, MIN, MAX or PRODUCT
    prescale: float = 1.0  # always 1 unless capabilities.scales
    postscale: float = 1.0  # always 1 unless capabilities.scales; it includes the division for an average
    kind: Kind = Kind.ALLREDUCE


class Prepared(ABC):
    """A plan that can be run repeatedly, each time with other addresses."""

    @abstractmethod
    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        """Start the plan with these addresses, and return its Work.

        ``sources[i]`` and ``targets[i]`` have ``plan.counts[i]`` elements each. They are the same address, or their
        memory is disjoint.
        """

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        """Run the plan to its end if all ranks pass real data, and return True.

        Otherwise write nothing, and return False.

        If ``real`` is False, this rank has no real data, and its addresses are not used. The result is the same on all
        ranks. This is called only if ``capabilities.atomic``, and for at least one element.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot run atomically")

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        """Try for about 0.1 s to do ``run_atomic`` with real data. Return None if not all ranks have arrived by then.

        This is called only if ``capabilities.resumable``. After None, it is called again with the same ``ticket``, by
        any one thread at a time, until it returns True or False; nothing else is called on the communicator meanwhile.
        A further call with the same ticket does nothing and returns the same result, so that a caller that was
        interrupted can ask for the result.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be run in several tries")

    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Set the addresses that ``run_bound`` uses. They stay set until the next ``bind`` or ``run_atomic``.

        This takes little time if the addresses are the same as before. The caller keeps the owners of the memory alive.
        """
        self._addresses = (list(sources), list(targets))

    def run_bound(self, real: bool) -> bool:
        """Do ``run_atomic`` with the addresses that ``bind`` has set. If ``real`` is False, none need to be set."""
        sources, targets = getattr(self, "_addresses", ([], []))
        return self.run_atomic(sources, targets, real)


def dense(*buffers: Buffer) -> None:
    """Raise ValueError, with shape and strides, if one of ``buffers`` has gaps between its elements.

    An address and a count cannot describe such a buffer.
    """
    for buffer in buffers:
        if buffer.strides is not None and not buffer.is_dense:
            raise ValueError(
                f"a {buffer.dtype.label} buffer of shape {buffer.shape} and strides {buffer.strides} leaves gaps in "
                "memory, and transports move whole memory; pass a contiguous copy"
            )


class Transport(ABC):
    """A communicator between the ranks of one group; the base class of all transports.

    A transport implements ``open``, ``close``, ``allreduce``, ``allgatherv`` and ``broadcast``; the base class derives
    the other collectives from them. A stream-ordered transport must also implement ``reducescatterv`` and
    ``alltoallv``; its ``barrier`` is never called.
    """

    capabilities: Capabilities = Capabilities()

    def capabilities_for(self, kind: Kind) -> Capabilities:
        """Return the capabilities for operations of one kind; by default the same for all.

        May be called before ``open``.
        """
        return self.capabilities

    @abstractmethod
    def open(self, context: Context) -> None:
        """Connect to the other members. All of them call this; it returns when all have.

        Raises DeadlineExceeded after ``context.timeout_s`` seconds.
        """
        self.context = context

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        """Take part while other ranks open further instances of this transport; it is called instead of ``open``.

        If the provider is ``attended``, this transport can only be opened if also the ranks outside its group take
        part. So every rank of a composed communicator calls this, each on an instance of its own; a rank that opens an
        instance itself calls this afterwards. ``context.members`` are all ranks of the composed communicator. ``check``
        raises an error to end the wait. After this, only ``abort`` and ``close`` may be called. Raises DeadlineExceeded
        after ``context.timeout_s`` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. A second call has no effect.

        No collective is pending when this is called. The processes of other members may already have ended.
        """

    def abort(self) -> None:
        """Make everything that is pending raise now. Any thread may call this.

        After it, only ``close`` may be called.
        """

    def check_queued(self) -> None:
        """Raise the error if work that earlier calls have enqueued was aborted after these calls had returned.

        It returns at once. Any thread may call it.
        """

    @abstractmethod
    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        """Write source of rank 0 op source of rank 1 op … source of the last rank to ``target``, on all ranks.

        Source and target are the same memory or disjoint.
        """

    @abstractmethod
    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        """Write the sources of all ranks, one after the other, to ``target``; ``counts[r]`` elements come from rank r."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work:
        """Copy the buffer of ``root``, a rank of this communicator, to all ranks."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        """Reduce the sources of all ranks, and write this rank's part of the result to ``target``.

        The parts are in the order of the ranks; rank r gets ``counts[r]`` elements.
        """
        dense(source, target)
        whole = self._temporary(source.count, source.dtype)
        _finish(self.allreduce(source, whole, op), self.context)
        size = source.dtype.itemsize
        ctypes.memmove(target.address, whole.address + sum(counts[: self.context.rank]) * size, target.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        """Send ``counts[s][d]`` elements from each rank s to each rank d.

        ``source`` holds the parts for all ranks, one after the other; ``target`` receives the parts from all ranks
        likewise. Both are in the order of the ranks.
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
        """Return a Work that is complete on no rank before every rank has called this."""
        one = self._temporary(1, DType.U8)
        return self.allreduce(one, one, ReduceOp.Max)

    def allocate(self, nbytes: int) -> Memory:
        """Return new memory of ``nbytes`` bytes from which this transport can send efficiently."""
        queue = self.context.queue
        return Memory(nbytes) if queue is None else queue.runtime.allocate(nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        """Return a Prepared that can run ``plan``. This is called only if ``capabilities.vectored``."""
        raise NotImplementedError(f"{type(self).__name__} is not vectored")

    def _temporary(self, count: int, dtype: DType) -> Buffer:
        if self.capabilities.stream_ordered:
            raise NotImplementedError(f"{type(self).__name__} is stream-ordered, and must write this operation itself")
        memory = Memory(count * dtype.itemsize)
        return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _finish(work: Work, context: Context) -> None:
    while not work.wait(context.timeout_s):
        pass  # no deadline, because a slow peer is not a dead one: abort() ends this wait
