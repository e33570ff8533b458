"""The transport over NCCL. It translates each collective into calls of NCCL, on one stream of one device."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate

from ddl_nccl.codes import BYTES, CARRIED, OPS, TYPES, native
from ddl_nccl.communicator import NcclCommunicator
from ddl_nccl.layer import Raw
from ddl_nccl.marks import Marks
from ddl_nccl.queued import QueuedWork
from ddl_nccl.reductions import OwnReductions
from ddl_nccl.watchdog import unwatch, watch
from ddlcore.contracts.device import Queue
from ddlcore.contracts.transport import ALL_OPS, DONE, Capabilities, Context, Transport, Work, dense
from ddlcore.types import Buffer, DType, ReduceOp


class NcclTransport(Transport):
    """A transport for any number of ranks on any hosts, each with its own GPU.

    Calls of NCCL are queued on ``context.queue``. ``raw`` is NCCL itself, or a stand-in for NCCL; by default ``open``
    loads NCCL.
    """

    capabilities = Capabilities(
        devices=frozenset({"cuda"}), ops=ALL_OPS | {ReduceOp.Average}, stream_ordered=True
    )  # fmt: skip

    def __init__(self, raw: Raw | None = None) -> None:
        communicator = self._communicator = NcclCommunicator(raw)
        self._call, self._on, self._check = communicator.call, communicator.on, communicator.check
        self._raw: Raw
        self._queue: Queue
        self._own: OwnReductions | None = None
        self._native: frozenset[tuple[DType, ReduceOp]] = frozenset()
        self._marks: Marks = communicator.marks

    # --- life

    def open(self, context: Context) -> None:
        super().open(context)
        communicator = self._communicator
        self._queue = communicator.prepare(context)
        self._marks = communicator.marks
        self._native = native(bool(context.settings.get("nccl_native_16bit", False)))
        until_s = time.monotonic() + context.timeout_s
        try:
            self._raw = communicator.join(until_s)
            self._own = OwnReductions(self._raw, self._on, self._queue, context.rank, context.size)
            _open.add(self)
            watch(self)
            buffer = self._one()
            communicator.connect(until_s, lambda: self._reduced(buffer, buffer, ReduceOp.Max))
        except BaseException:
            self.abort()
            unwatch(self)
            raise

    def close(self) -> None:
        _open.discard(self)
        unwatch(self)
        communicator = self._communicator
        communicator.close()
        if self._own is not None and not communicator.drained():
            _kept.append(self._own)  # the device still uses its memory
        self._own = None
        self._marks = communicator.marks

    def abort(self) -> None:
        self._communicator.abort()

    def disown(self) -> None:
        """Forget the communicator and its memory in a forked process.

        CUDA does not work in a forked process, and the parent process owns everything that was opened.
        """
        self._communicator.disown()
        self._own = None

    def check_queued(self) -> None:
        self._check("what is queued")

    def look(self) -> None:
        """Check the communicator for errors and deadlines. The watchdog thread calls this method every 0.1 s."""
        self._communicator.look()

    # --- collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        if source.count == 0:
            return self._nothing()
        return self._begin("allreduce", lambda: self._reduced(source, target, op), source, target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        width, n = source.dtype.itemsize, self.context.size
        if not any(counts):
            return self._nothing()
        if counts.count(counts[0]) == n:
            return self._begin(
                "allgather",
                lambda: self._raw.all_gather(source.address, target.address, source.nbytes, BYTES, *self._on()),
                source,
                target,
            )

        def gather() -> None:
            at = target.address
            for root, count in enumerate(counts):
                if count:
                    self._raw.broadcast(source.address, at, count * width, BYTES, root, *self._on())
                at += count * width

        return self._begin("allgather", self._grouped(gather), source, target)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        if buffer.count == 0:
            return self._nothing()
        return self._begin(
            "broadcast",
            lambda: self._raw.broadcast(buffer.address, buffer.address, buffer.nbytes, BYTES, root, *self._on()),
            buffer,
        )

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        if not any(counts):
            return self._nothing()
        return self._begin("reducescatter", lambda: self._scattered(source, target, counts, op), source, target)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        me, width = self.context.rank, source.dtype.itemsize
        sent, got = counts[me], [row[me] for row in counts]
        out, into = _starts(source.address, sent, width), _starts(target.address, got, width)

        def exchange() -> None:
            for i in range(1, self.context.size):
                to, source_rank = (me + i) % self.context.size, (me - i) % self.context.size
                if sent[to]:
                    self._raw.send(out[to], sent[to] * width, BYTES, to, *self._on())
                if got[source_rank]:
                    self._raw.recv(into[source_rank], got[source_rank] * width, BYTES, source_rank, *self._on())

        def everything() -> None:
            self._grouped(exchange)()
            if sent[me]:
                self._queue.copy(out[me], into[me], sent[me] * width)

        return self._begin("alltoall", everything, source, target)

    def barrier(self) -> Work:
        buffer = self._one()
        self._call("barrier", lambda: self._reduced(buffer, buffer, ReduceOp.Max))
        return QueuedWork(self._check, self._queue.record(), "barrier", buffer)

    # --- how they are carried out

    def _reduced(self, source: Buffer, target: Buffer, op: ReduceOp) -> None:
        dtype = source.dtype
        if dtype is DType.BOOL:
            self._raw.all_reduce(source.address, target.address, source.count, BYTES, CARRIED[op], *self._on())
        elif (dtype, op) in self._native:
            self._raw.all_reduce(source.address, target.address, source.count, TYPES[dtype], OPS[op], *self._on())
        else:
            assert self._own is not None
            self._own.allreduce(source, target, op)

    def _scattered(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> None:
        dtype = source.dtype
        if dtype is not DType.BOOL and (dtype, op) not in self._native:
            assert self._own is not None
            self._own.reducescatterv(source, target, counts, op)
            return
        code, how = (BYTES, CARRIED[op]) if dtype is DType.BOOL else (TYPES[dtype], OPS[op])
        if counts.count(counts[0]) == len(counts):
            self._raw.reduce_scatter(source.address, target.address, counts[0], code, how, *self._on())
            return

        def scatter() -> None:
            for root, (at, count) in enumerate(zip(_starts(source.address, counts, dtype.itemsize), counts)):
                if count:
                    self._raw.reduce(at, target.address, count, code, how, root, *self._on())

        self._grouped(scatter)()

    def _grouped(self, calls: Callable[[], None]) -> Callable[[], None]:
        def grouped() -> None:
            self._raw.group_start()
            try:
                calls()
            finally:
                self._raw.group_end()

        return grouped

    def _begin(self, what: str, call: Callable[[], object], *buffers: Buffer) -> Work:
        dense(*buffers)
        self._call(what, call)
        if self._marks.patience_s:
            self._marks.set(self._queue.record())
        return DONE if self.capabilities.stream_ordered else QueuedWork(self._check, self._queue.record(), what)

    def _one(self) -> Buffer:
        """Return a buffer of one element, with undefined content, for a reduction whose result nobody needs."""
        memory = self._queue.runtime.allocate(4)
        return Buffer(memory.address, 1, DType.I32, (1,), owner=memory)

    def _nothing(self) -> Work:
        self._check("a call")
        return DONE


def _starts(address: int, counts: Sequence[int], width: int) -> list[int]:
    """Return a list of the addresses at which the parts of the ranks begin.

    The first part begins at ``address``. ``counts[r]`` is the number of elements of rank r's part, and ``width`` is the
    size of an element in bytes.
    """
    return [address + before * width for before in accumulate(counts[:-1], initial=0)]


_open: weakref.WeakSet[NcclTransport] = weakref.WeakSet()
_kept: list[object] = []  # memory that the device may still use


def _after_fork() -> None:
    for transport in list(_open):
        transport.disown()


os.register_at_fork(after_in_child=_after_fork)
