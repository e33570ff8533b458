"""The transports for a communicator of one rank: for a transport that composes others, and for tests.

A collective only copies the input to the output. If a plan has scale factors, the values are multiplied by them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
from ddlcore.types import Buffer, ReduceOp

__all__ = ["QueuedSolo", "SoloTransport"]


class SoloTransport(Transport):
    """The transport for a communicator of one rank whose tensors are in host memory. The calls never wait."""

    capabilities = Capabilities(vectored=True, scales=True, order_fixed=True, resumable_moves=True)

    def open(self, context: Context) -> None:
        if context.size != 1:
            raise ValueError(f"solo serves one rank, not {context.size}; choose another --backend")
        super().open(context)

    def close(self) -> None:
        pass

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return _copy(source, target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return _copy(source, target)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        return DONE

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        return _copy(source, target)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        return _copy(source, target)

    def barrier(self) -> Work:
        return DONE

    def prepare(self, plan: Plan) -> Prepared:
        return _PreparedBucket(self, plan)

    def prepare_move(self, move: Move) -> PreparedMove:
        return _SoloMove(self, move)


class _SoloMove(PreparedMove):
    _last = 0  # the ticket of the last run

    def run(self, source: Buffer, target: Buffer, counts: Sequence[int] | Sequence[Sequence[int]], ticket: int) -> None:
        if ticket != self._last:
            super().run(source, target, counts, ticket)
            self._last = ticket


class _PreparedBucket(Prepared):
    def __init__(self, transport: SoloTransport, plan: Plan) -> None:
        self._kernels = transport.context.kernels
        self._plan = plan
        self._plain = plan.prescale == 1.0 and plan.postscale == 1.0

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        plan = self._plan
        for source, target, count in zip(sources, targets, plan.counts):
            if self._plain:  # without the kernels, so that a world of one rank need not load them
                _move(int(source), int(target), count * plan.dtype.itemsize)
            else:
                self._kernels.reduce(
                    [source], target, count, plan.dtype, plan.op, scale=plan.postscale, prescale=plan.prescale
                )
        return DONE


class QueuedSolo(Transport):
    """The transport for a communicator of one rank whose tensors are in device memory.

    A call only adds the copies to the queue of the device (``Context.queue``), and does not wait for them.
    """

    capabilities = Capabilities(vectored=True, scales=True, order_fixed=True, stream_ordered=True)

    def open(self, context: Context) -> None:
        if context.size != 1 or context.queue is None:
            raise ValueError(f"solo serves one rank on one queue, not {context.size} ranks")
        super().open(context)
        self._queue = context.queue

    def close(self) -> None:
        pass

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        dense(source, target)
        return self.copy(source.address, target.address, source.nbytes)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        dense(source, target)
        return self.copy(source.address, target.address, source.nbytes)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        return DONE

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        dense(source, target)
        return self.copy(source.address, target.address, source.nbytes)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        dense(source, target)
        return self.copy(source.address, target.address, source.nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        return _QueuedBucket(self, plan)

    def copy(self, source: int, target: int, nbytes: int) -> Work:
        """Add one copy of ``nbytes`` bytes to the queue of the device.

        ``source`` and ``target`` are addresses. Do nothing if they are the same, or if ``nbytes`` is 0.
        """
        if source != target and nbytes:
            self._queue.copy(source, target, nbytes)
        return DONE


class _QueuedBucket(Prepared):
    def __init__(self, transport: QueuedSolo, plan: Plan) -> None:
        self._transport = transport
        self._kernels = transport.context.kernels
        self._plan = plan
        self._plain = plan.prescale == 1.0 and plan.postscale == 1.0

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        plan = self._plan
        for source, target, count in zip(sources, targets, plan.counts):
            if self._plain:
                self._transport.copy(source, target, count * plan.dtype.itemsize)
            elif count:
                self._kernels.reduce(
                    [source], target, count, plan.dtype, plan.op, scale=plan.postscale, prescale=plan.prescale
                )
        return DONE


def _copy(source: Buffer, target: Buffer) -> Work:
    dense(source, target)
    _move(source.address, target.address, source.nbytes)
    return DONE


def _move(source: int, target: int, nbytes: int) -> None:
    if source != target and nbytes:
        ctypes.memmove(target, source, nbytes)
