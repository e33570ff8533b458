"""The transport contract: one communicator for one group of ranks, from ``open`` to ``close``.

The rules:

* The executor is the part of ddl that runs buckets and calls the transport. The executor makes one call at a time, in
  the same order on every rank. Calls come from one thread at a time. If ``capabilities.thread_bound`` is true, all
  calls come from the thread that called ``open``. Only ``abort`` may be called by any thread at any moment. ``abort``
  returns within 1 s, and makes a pending call or Work raise an error.
* Memory is dense: the elements of a buffer fill ``nbytes`` bytes from ``address`` on, in any order of the axes. If a
  buffer has gaps, a transport raises ValueError before it sends anything. For this, the implementation of each
  collective calls ``dense(source, target)`` first.
* All members pass matching sizes. The arguments contain the counts of the sent *and* of the received elements, so a
  transport never exchanges sizes. A length of zero is always allowed.
* A ``Work`` is complete when the call returns (``DONE``), or after ``wait``, which has a timeout. A collective may do
  all its work before it returns, and return ``DONE``, if ``abort`` ends it within 1 s. A transport needs a Work of its
  own only if its calls return earlier.
* If ``capabilities.stream_ordered`` is true, addresses are in memory of the device of ``context.queue`` (or in pinned
  host memory). A call enqueues its work on that queue and returns ``DONE``. In this case, ``DONE`` means only that this
  rank has enqueued the work. If the work needs other memory, the transport itself keeps that memory alive.
* Source and target of an allreduce, and of each tensor of a plan, are the same memory or disjoint. Source and target of
  ``allgatherv``, ``reducescatterv`` and ``alltoallv`` are always disjoint.
* Buffers belong to the executor. The executor keeps them until the Work is done or the transport is aborted.
* One function of a transport converts the errors of its library to TransportError, with the library's error as the
  cause. A slow peer is not a lost peer: a transport disables its own timeouts, because the control network decides
  which rank is lost.
* The executor averages, scales, casts, encodes and fuses tensors, unless the capabilities say that the transport does.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddlcore.contracts.device import Queue
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.memory import Memory, view
from ddlcore.contracts.store import Store
from ddlcore.types import Buffer, DType, Kind, Member, ReduceOp

__all__ = [
    "ALL_DTYPES",
    "ALL_OPS",
    "DONE",
    "Capabilities",
    "Context",
    "Memory",
    "Move",
    "Plan",
    "Prepared",
    "PreparedMove",
    "Transport",
    "Work",
    "dense",
    "view",
]

ALL_DTYPES = frozenset(DType)
ALL_OPS = frozenset({ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product})


@dataclass(frozen=True)
class Capabilities:
    """The description of what a transport can do.

    ddl reads the capabilities once, when it chooses the transports for a group of ranks. It logs the capabilities and
    the reason for the choice.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[DType] = (
        ALL_DTYPES  # types that can be reduced; 16-bit floats are added in float32 and rounded once (host_first: twice)
    )
    ops: frozenset[ReduceOp] = ALL_OPS  # with Average, the transport divides sums of floats by the number of ranks
    one_host: bool = False  # the transport can connect only members that share a host
    vectored: bool = False  # prepare() uses the tensors of a bucket by their addresses, so no copy is needed
    scales: bool = False  # the transport itself applies ``prescale`` and ``postscale`` of vectored plans
    atomic: bool = False  # vectored plans can run as an atomic allreduce, see Prepared.run_atomic
    resumable: bool = False  # an atomic run may consist of several tries on a user thread: Prepared.try_run_atomic
    resumable_moves: bool = False  # a prepared move may be repeated on another thread: see PreparedMove.run
    order_fixed: bool = False  # values are added in the order of the ranks in every bucket: bitwise reproducible
    host_first: bool = False  # values are added within each host, then across hosts in the order of their first ranks
    thread_bound: bool = False
    abort: bool = True  # False: a pending call cannot be interrupted; the job exits without waiting for the call
    stream_ordered: bool = False  # calls only enqueue work on ``Context.queue``; later work on this queue runs after it


@dataclass(frozen=True)
class Context:
    """The values that a transport gets when it is opened."""

    rank: int  # this rank's number in this communicator
    members: tuple[Member, ...]  # in the order of their ranks in this communicator
    store: Store  # the part of the job's store that belongs to this communicator
    kernels: Kernels
    settings: Mapping[str, str | int | float | bool]  # the plugin's own settings and the core's
    timeout_s: float  # how long ``open`` may take
    name: str = ""  # name of the communicator, for messages
    address: str = ""  # this host's address on the route to the launcher; "" if all ranks are on one host
    queue: Queue | None = None  # queue of the communicator's device; None if the communicator works on host memory

    @property
    def size(self) -> int:
        return len(self.members)


class Work(ABC):
    """A collective that has been started.

    The thread that has started the collective calls ``wait`` repeatedly, each time with a timeout below a second, until
    ``wait`` returns True or raises an error. After that, the Work is not used any more. Until then, no other collective
    of the communicator is started.
    """

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the collective is complete, and return True. Return False if ``timeout_s`` seconds pass before.

        Raises TransportError if the collective has failed. After ``abort`` of the transport, raises TransportError
        within 1 s.
        """


class _Done(Work):
    def wait(self, timeout_s: float) -> bool:
        return True


DONE: Work = _Done()  # the Work of a collective that is complete when its call returns


@dataclass(frozen=True)
class Plan:
    """The description of an allreduce of several tensors of one type, made before the tensors' addresses are known."""

    counts: tuple[int, ...]  # number of elements of each tensor
    dtype: DType
    op: ReduceOp  # Sum, Min, Max or Product
    prescale: float = 1.0  # always 1 unless capabilities.scales
    postscale: float = 1.0  # always 1 unless capabilities.scales; for an average, it includes the division
    kind: Kind = Kind.ALLREDUCE


class Prepared(ABC):
    """A plan that can be run repeatedly, each time with other addresses."""

    @abstractmethod
    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        """Start the plan for the tensors at these addresses, and return its Work.

        The tensors at ``sources[i]`` and ``targets[i]`` have ``plan.counts[i]`` elements each. The two addresses are
        equal, or the memory of the two tensors is disjoint.
        """

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        """Run the plan as an atomic allreduce: return True if all ranks pass real data, otherwise False.

        If all ranks pass real data, the plan runs to its end. Otherwise nothing is written to ``targets`` on any rank.
        ``real``: whether this rank has real data; if False, its addresses are not used. The result is the same on all
        ranks. This is called only if ``capabilities.atomic`` is true, and only for at least one element.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot run atomically")

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        """Try to do the same as ``run_atomic`` with real data. Return None if a rank is missing after about 0.1 s.

        This is called only if ``capabilities.resumable`` is true. After a result of None, this method is called again
        with the same ``ticket`` until the result is True or False. Any thread may make these calls, one at a time.
        Until then, no other method of the communicator is called. After a result of True or False, a further call with
        the same ticket has no effect and returns the same result. So a caller that was interrupted can ask for the
        result again.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be run in several tries")

    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Set the addresses that ``run_bound`` uses until the next call of ``bind`` or ``run_atomic``.

        This takes little time if the addresses are the same as in the last call. The caller keeps the memory alive.
        """
        self._addresses = (list(sources), list(targets))

    def run_bound(self, real: bool) -> bool:
        """Do the same as ``run_atomic``, with the addresses that ``bind`` has set.

        If ``real`` is False, ``bind`` need not have been called.
        """
        sources, targets = getattr(self, "_addresses", ([], []))
        return self.run_atomic(sources, targets, real)


@dataclass(frozen=True)
class Move:
    """The description of a collective other than an allreduce, made before the memory and the counts are known."""

    kind: Kind  # ALLGATHER, BROADCAST, ALLTOALL or REDUCESCATTER
    dtype: DType
    op: ReduceOp = ReduceOp.Sum  # of a REDUCESCATTER: Sum, Min, Max or Product
    root: int = 0  # of a BROADCAST: the number of the root in the communicator


class PreparedMove:
    """A move that can be run repeatedly, each time with other memory and other counts.

    This class calls the transport's methods. A transport whose ``resumable_moves`` is true returns objects of a class
    of its own.
    """

    def __init__(self, transport: Transport, move: Move) -> None:
        self._transport = transport
        self._move = move

    def run(self, source: Buffer, target: Buffer, counts: Sequence[int] | Sequence[Sequence[int]], ticket: int) -> None:
        """Run the collective, and return when this rank's part of it is complete.

        ``source``, ``target`` and ``counts`` are the arguments of ``allgatherv``, ``alltoallv`` or ``reducescatterv``.
        For a broadcast, ``counts`` is empty, all ranks get the root's ``source`` in ``target``, and on the root these
        may be the same memory. ``ticket`` is a positive number that is different for each run.

        If ``capabilities.resumable_moves`` is true, a call with the ticket of the last complete run has no effect, and
        any thread may make it. So a thread that continues the work of an interrupted thread can ask for the run again.
        A run with a new ticket begins only when all ranks are about to make the same call, and no other method of the
        communicator is called until the run is complete.
        """
        transport, move = self._transport, self._move
        fitting: Any = counts  # mypy cannot see that ``counts`` has the type that belongs to ``move.kind``
        if move.kind is Kind.ALLGATHER:
            work = transport.allgatherv(source, target, fitting)
        elif move.kind is Kind.ALLTOALL:
            work = transport.alltoallv(source, target, fitting)
        elif move.kind is Kind.REDUCESCATTER:
            work = transport.reducescatterv(source, target, fitting, move.op)
        else:
            if transport.context.rank == move.root and source.address != target.address:
                ctypes.memmove(target.address, source.address, source.nbytes)
            work = transport.broadcast(target, move.root)
        _finish(work, transport.context)


def dense(*buffers: Buffer) -> None:
    """Raise ValueError if one of ``buffers`` has gaps between its elements.

    The message contains the shape and the strides of that buffer. Transports cannot move a buffer with gaps, because
    they get only an address and a count.
    """
    for buffer in buffers:
        if buffer.strides is not None and not buffer.is_dense:
            raise ValueError(
                f"a {buffer.dtype.label} buffer of shape {buffer.shape} and strides {buffer.strides} leaves gaps in "
                "memory, and transports move whole memory; pass a contiguous copy"
            )


class Transport(ABC):
    """A communicator between the ranks of one group. This is the base class of all transports.

    A transport implements ``open``, ``close``, ``allreduce``, ``allgatherv`` and ``broadcast``. The base class
    implements the other collectives by means of these. A stream-ordered transport must also implement
    ``reducescatterv`` and ``alltoallv``; its ``barrier`` is never called.
    """

    capabilities: Capabilities = Capabilities()

    def capabilities_for(self, kind: Kind) -> Capabilities:
        """Return the capabilities for operations of ``kind``. By default they are the same for all kinds.

        This may be called before ``open``.
        """
        return self.capabilities

    @abstractmethod
    def open(self, context: Context) -> None:
        """Connect to the other members. All members call this. The call returns when all members have called it.

        An implementation begins with ``super().open(context)``, which keeps the context as ``self.context``. Raises
        DeadlineExceeded if not all members are connected after ``context.timeout_s`` seconds. If ``open`` raises an
        error, ddl calls ``close``.
        """
        self.context = context

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        """Help other ranks to open instances of this transport. This is called instead of ``open`` on this instance.

        Some transports can be opened only if all ranks outside the group take part; their provider has ``attended``
        set. Such a transport may be the part of a communicator that connects its hosts. Then every rank of the
        communicator creates a separate instance and calls ``attend`` on it, with all ranks of the communicator as
        ``context.members``. If a rank also has an instance to open, it calls ``open`` on that one first. ``check`` is
        called while this rank waits; if ``check`` raises an error, the wait ends with that error. After ``attend``,
        only ``abort`` and ``close`` may be called. Raises DeadlineExceeded after ``context.timeout_s`` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections and free all memory of this transport. A second call has no effect.

        On this rank, no collective is pending when this is called. The ranks do not agree before they close: another
        member may still be in the last collective, and the processes of other members may already have ended. What
        this rank has sent for completed collectives must still arrive after ``close``, although ``close`` waits for no
        other rank. So a transport that was not aborted must not reset its connections.
        """

    def abort(self) -> None:
        """Make all pending calls and Works raise an error now. Any thread may call this.

        After ``abort``, only ``close`` may be called.
        """

    def check_queued(self) -> None:
        """Raise an error if enqueued work was aborted after the call that enqueued it had returned.

        Otherwise, do nothing. This returns at once. Any thread may call this.
        """

    @abstractmethod
    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        """Reduce the sources of all ranks by ``op``, and write the result to ``target`` on all ranks.

        ``source`` and ``target`` are the same memory or disjoint.
        """

    @abstractmethod
    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        """Write the sources of all ranks to ``target``, one after the other in the order of the ranks.

        ``counts[r]`` is the number of elements that rank r contributes.
        """

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work:
        """Copy the content of ``buffer`` on rank ``root`` of this communicator to ``buffer`` on all other ranks."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        """Reduce the sources of all ranks, and write this rank's part of the result to ``target``.

        The parts of the result are in the order of the ranks. Rank r gets ``counts[r]`` elements.
        """
        dense(source, target)
        whole = self._temporary(source.count, source.dtype)
        _finish(self.allreduce(source, whole, op), self.context)
        size = source.dtype.itemsize
        ctypes.memmove(target.address, whole.address + sum(counts[: self.context.rank]) * size, target.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        """Send ``counts[s][d]`` elements from each rank s to each rank d.

        ``source`` contains the parts for all ranks, one after the other in the order of the ranks. ``target`` receives
        the parts from all ranks in the same order.
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
        """Start a barrier, and return its Work. No rank's Work is complete before all ranks have called ``barrier``."""
        one = self._temporary(1, DType.U8)
        return self.allreduce(one, one, ReduceOp.Max)

    def allocate(self, nbytes: int) -> Memory:
        """Return new memory of ``nbytes`` bytes from which this transport can send efficiently."""
        queue = self.context.queue
        return Memory(nbytes) if queue is None else queue.runtime.allocate(nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        """Return an object that can run ``plan`` repeatedly.

        This is called only if ``capabilities.vectored`` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} is not vectored")

    def prepare_move(self, move: Move) -> PreparedMove:
        """Return an object that can run ``move`` repeatedly. This is called only for transports of host memory."""
        return PreparedMove(self, move)

    def _temporary(self, count: int, dtype: DType) -> Buffer:
        if self.capabilities.stream_ordered:
            raise NotImplementedError(f"{type(self).__name__} is stream-ordered, and must write this operation itself")
        memory = Memory(count * dtype.itemsize)
        return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _finish(work: Work, context: Context) -> None:
    while not work.wait(context.timeout_s):
        pass  # no deadline, because a slow peer is not a dead one: abort() ends this wait
