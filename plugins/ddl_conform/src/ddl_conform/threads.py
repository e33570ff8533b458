"""The transport between ranks that are threads of one process. Every rank reads the other ranks' memory directly.

All ranks of a communicator share one object, the meeting. Rank 0 creates the meeting and publishes a token in the
store. The other ranks use the token to find the meeting. In a collective, every rank passes the addresses of its memory
to the other ranks through the meeting. Then each rank does its share of the work for all ranks, and waits until every
rank has finished.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

from ddlcore.contracts.transport import DONE, Capabilities, Context, Memory, Plan, Prepared, Transport, Work, dense
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Buffer, ReduceOp

__all__ = ["ThreadsTransport"]

KEY = "meeting"
SLICE_S = 0.1
SHARE_BYTES = 1 << 20  # how many bytes of results a rank computes before it copies them to all ranks


class _Meeting:
    """The object through which the ranks of one communicator wait for each other and exchange addresses.

    ``shown`` contains the object that each rank has passed to the other ranks, such as an address.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shown: list[Any] = [None] * size
        self._changed = threading.Condition()
        self._present = 0
        self._turn = 0
        self._aborted_by: int | None = None

    def wait(self, deadline: float | None = None) -> None:
        """Wait until all ranks have called this method.

        Raises TransportError after ``abort``. Raises DeadlineExceeded if a rank is missing at ``deadline``, which is a
        time of ``time.monotonic``; None means that the wait has no limit.
        """
        with self._changed:
            self._check()
            turn = self._turn
            self._present += 1
            if self._present == self.size:
                self._present = 0
                self._turn += 1
                self._changed.notify_all()
                return
            while self._turn == turn:
                self._check()
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"threads: {self.size - self._present} of {self.size} ranks are missing; raise --open-timeout-s"
                    )
                self._changed.wait(SLICE_S)

    def _check(self) -> None:
        if self._aborted_by is not None:
            raise TransportError(f"threads: the communicator was aborted by its rank {self._aborted_by}")

    def abort(self, rank: int) -> None:
        with self._changed:
            if self._aborted_by is None:
                self._aborted_by = rank
            self._changed.notify_all()


# The meetings by token. This is a global variable, because the ranks' threads share nothing else within the process.
MEETINGS: Final[weakref.WeakValueDictionary[str, _Meeting]] = weakref.WeakValueDictionary()


class ThreadsTransport(Transport):
    """The transport for any number of ranks that are threads of this process."""

    capabilities = Capabilities(one_host=True, vectored=True, scales=True, order_fixed=True)

    def __init__(self) -> None:
        self._meeting: _Meeting | None = None
        self._aborted = False

    def open(self, context: Context) -> None:
        super().open(context)
        deadline = time.monotonic() + context.timeout_s
        if context.rank == 0:
            token = secrets.token_hex(16)
            MEETINGS[token] = self._meeting = _Meeting(context.size)
            context.store.set(KEY, token.encode())
        else:
            token = context.store.get_checked(KEY, context.timeout_s, self._check_opening).decode()
            self._meeting = MEETINGS.get(token)
            if self._meeting is None:
                raise TransportError("threads: rank 0 is not in this process; use --backend shm between processes")
        if self._aborted:  # ``abort`` may have come before there was a meeting
            self._meeting.abort(context.rank)
        self._meeting.wait(deadline)
        if context.rank == 0:
            context.store.delete(KEY)

    def _check_opening(self) -> None:
        if self._aborted:
            raise TransportError(f"threads: the communicator was aborted by its rank {self.context.rank}")

    def close(self) -> None:
        self._meeting = None

    def abort(self) -> None:
        self._aborted = True
        meeting = self._meeting
        if meeting is not None:
            meeting.abort(self.context.rank)

    def meet(self, mine: Any) -> list[Any]:
        """Pass ``mine`` to the other ranks, and return the objects that all ranks have passed, in the order of ranks.

        Waits until all ranks have called this method. After the caller has used the result, it must call ``part``.
        """
        if self._meeting is None:
            raise TransportError("threads: the communicator is not open")
        self._meeting.shown[self.context.rank] = mine
        self._meeting.wait()
        return self._meeting.shown

    def part(self) -> Work:
        """End a collective that ``meet`` has begun: wait until no rank uses the memory of another rank any more."""
        assert self._meeting is not None
        self._meeting.wait()
        return DONE

    def prepare(self, plan: Plan) -> Prepared:
        return _PreparedBucket(self, plan)

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        dense(source, target)
        return self.prepare(Plan((source.count,), source.dtype, op)).start([source.address], [target.address])

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        dense(source, target)
        size = source.dtype.itemsize
        sources = self.meet(source.address)
        at = target.address
        for address, count in zip(sources, counts):
            if address != at:
                ctypes.memmove(at, address, count * size)
            at += count * size
        return self.part()

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        sources = self.meet(buffer.address)
        if self.context.rank != root:
            ctypes.memmove(buffer.address, sources[root], buffer.nbytes)
        return self.part()

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        dense(source, target)
        rank, size = self.context.rank, source.dtype.itemsize
        offset = sum(counts[:rank]) * size
        sources = [address + offset for address in self.meet(source.address)]
        result = Memory(target.nbytes)  # separate, because other ranks may still read the memory of the target
        self.context.kernels.reduce(sources, result.address, counts[rank], source.dtype, op)
        self.part()
        ctypes.memmove(target.address, result.address, target.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        dense(source, target)
        me, size = self.context.rank, source.dtype.itemsize
        sources = self.meet(source.address)
        at = target.address
        for address, row in zip(sources, counts):
            ctypes.memmove(at, address + sum(row[:me]) * size, row[me] * size)
            at += row[me] * size
        return self.part()

    def barrier(self) -> Work:
        if self._meeting is None:
            raise TransportError("threads: the communicator is not open")
        return self.part()


class _PreparedBucket(Prepared):
    """A prepared plan. Each rank reduces its share of every tensor, and writes the result into all ranks' targets.

    No other rank reads or writes this share of the tensors, so source and target may be the same memory.
    """

    def __init__(self, transport: ThreadsTransport, plan: Plan) -> None:
        self._transport = transport
        self._plan = plan

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        plan, context = self._plan, self._transport.context
        size = plan.dtype.itemsize
        shown = self._transport.meet((list(map(int, sources)), list(map(int, targets))))
        for i, count in enumerate(plan.counts):
            begin = count * context.rank // context.size
            end = count * (context.rank + 1) // context.size
            while begin < end:
                n = min(end - begin, SHARE_BYTES // size)
                offset = begin * size
                self._share([s[i] + offset for s, _ in shown], [t[i] + offset for _, t in shown], n)
                begin += n
        return self._transport.part()

    def _share(self, sources: list[int], targets: list[int], count: int) -> None:
        plan = self._plan
        result = Memory(count * plan.dtype.itemsize)
        self._transport.context.kernels.reduce(
            sources, result.address, count, plan.dtype, plan.op, scale=plan.postscale, prescale=plan.prescale
        )
        for target in targets:
            ctypes.memmove(target, result.address, count * plan.dtype.itemsize)
