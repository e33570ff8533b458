"""The plainest transport there is: ranks are threads that meet at a barrier and compute with the oracle.

It has only what the contract asks for: everything else is derived from that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ddlcore.contracts.transport import DONE, Capabilities, Context, Transport, Work, dense, view
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.testing import oracle
from ddlcore.types import Buffer, ReduceOp

__all__ = ["Meeting", "PlainTransport"]


class Meeting:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.aborted = False
        self.sources: list[oracle.Array] = [None] * size


class PlainTransport(Transport):
    """Copies every rank's source to where all see it, meets, and computes on each rank the whole result."""

    capabilities = Capabilities(order_fixed=True)

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def open(self, context: Context) -> None:
        super().open(context)
        try:
            self.meeting.barrier.wait(context.timeout_s)
        except threading.BrokenBarrierError:
            if self.meeting.aborted:
                raise TransportError(f"{context.name}: aborted while it was opened") from None
            raise DeadlineExceeded(f"not all {context.size} ranks came within {context.timeout_s:g} s") from None

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.meeting.aborted = True
        self.meeting.barrier.abort()

    def array(self, buffer: Buffer) -> oracle.Array:
        return np.frombuffer(view(buffer.address, buffer.nbytes), oracle.numpy_dtype(buffer.dtype))

    def exchange(self, source: oracle.Array) -> list[oracle.Array]:
        """Every rank's source."""
        self.meeting.sources[self.context.rank] = source.copy()
        self._meet()
        sources = list(self.meeting.sources)
        self._meet()
        return sources

    def _meet(self) -> None:
        try:
            self.meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise TransportError(f"{self.context.name}: aborted") from error

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        dense(source, target)
        self.array(target)[:] = oracle.reduce(self.exchange(self.array(source)), op)
        return DONE

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        dense(source, target)
        self.array(target)[:] = oracle.allgatherv(self.exchange(self.array(source)))
        return DONE

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        self.array(buffer)[:] = self.exchange(self.array(buffer))[root]
        return DONE
