"""Transports for tests with pretend devices, between ranks that are threads of one process.

``PretendTransport`` is stream-ordered: a call only adds work to the rank's queue, and returns before the work has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddl_conform.pretend import KIND, PretendQueue
from ddl_conform.threads import ThreadsTransport
from ddlcore.contracts.transport import ALL_OPS, DONE, Capabilities, Context, Plan, Prepared, Transport, Work, dense
from ddlcore.types import Buffer, ReduceOp

__all__ = ["MuteTransport", "PretendTransport"]


class PretendTransport(Transport):
    """A transport for the memory of pretend devices, which uses a ``threads`` transport.

    A call adds the call of the ``threads`` transport to the rank's queue, and returns immediately. The collective runs
    when the queues of all ranks have reached it.
    """

    capabilities = Capabilities(
        devices=frozenset({KIND}), one_host=True, vectored=True, scales=True, order_fixed=True, stream_ordered=True
    )

    def __init__(self) -> None:
        self._inner = ThreadsTransport()

    def open(self, context: Context) -> None:
        super().open(context)
        if not isinstance(context.queue, PretendQueue):
            raise TypeError("pretend serves pretend devices only")
        self._queue = context.queue
        self._inner.open(replace(context, kernels=context.queue.runtime.host_kernels, queue=None))

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return self._later([source, target], lambda: self._inner.allreduce(source, target, op))

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return self._later([source, target], lambda: self._inner.allgatherv(source, target, counts))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        return self._later([buffer], lambda: self._inner.broadcast(buffer, root))

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        return self._later([source, target], lambda: self._inner.reducescatterv(source, target, counts, op))

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        return self._later([source, target], lambda: self._inner.alltoallv(source, target, counts))

    def prepare(self, plan: Plan) -> Prepared:
        return _PreparedLater(self, self._inner.prepare(plan), plan)

    def _later(self, buffers: Sequence[Buffer], call: Callable[[], Work]) -> Work:
        dense(*buffers)
        used = [(buffer.address, buffer.nbytes) for buffer in buffers]
        return self.later(used, call)

    def later(self, used: Sequence[tuple[int, int]], call: Callable[[], Work]) -> Work:
        """Add ``call`` to the queue, and return a Work that is already complete.

        ``used`` lists the memory that ``call`` uses, as pairs (address, bytes). If some of this memory is freed before
        ``call`` runs, the queue fails.
        """

        def run() -> None:
            for address, nbytes in used:
                self._queue.runtime.require(address, nbytes)
            call()

        self._queue.call(run)
        return DONE


class MuteTransport(ThreadsTransport):
    """A ``threads`` transport that does not support the op Min.

    The ranks use an allreduce with Min to find out which buckets all ranks have launched. With this transport, they
    cannot find it out in this way.
    """

    capabilities = replace(ThreadsTransport.capabilities, ops=ALL_OPS - {ReduceOp.Min})


class _PreparedLater(Prepared):
    def __init__(self, transport: PretendTransport, inner: Prepared, plan: Plan) -> None:
        self._transport = transport
        self._inner = inner
        self._plan = plan

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        itemsize = self._plan.dtype.itemsize
        pairs = [*zip(sources, self._plan.counts), *zip(targets, self._plan.counts)]
        used = [(address, count * itemsize) for address, count in pairs]
        mine, theirs = list(sources), list(targets)
        return self._transport.later(used, lambda: self._inner.start(mine, theirs))
