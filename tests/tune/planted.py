"""A transport whose cost is known, and with it the best settings; a clock that only its calls move."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from ddl_conform.threads import ThreadsTransport

from ddlcore.contracts.transport import Context, Plan, Prepared, Work
from ddlcore.types import Buffer, ReduceOp

__all__ = ["Clock", "PlantedTransport", "bucket_ns", "step_ns"]

LATENCY_NS = 1_000_000.0  # of a bucket
BEST_BYTES = 192 << 10  # a bucket of so many bytes costs the least for each of them
COMPUTE_NS = 10_000_000.0  # of a step; a short one would be taken more often


class Clock:
    """What the ranks of a test take for the time. The threads of rank 0 move it.

    It stands still for the others: what they read would depend on how far rank 0 is at that moment.
    """

    now_ns = 0.0

    @classmethod
    def read(cls) -> int:
        return int(cls.now_ns) if threading.current_thread().name.endswith("-0") else 0


def bucket_ns(nbytes: int) -> float:
    """A latency, and congestion that grows with the square: too small is as bad as too large."""
    return LATENCY_NS * (1.0 + (nbytes / BEST_BYTES) ** 2)


def step_ns(tensor_bytes: Sequence[int], fusion_bytes: int) -> float:
    """A step with buckets filled in order up to ``fusion_bytes``."""
    buckets: list[int] = []
    for nbytes in tensor_bytes:
        if buckets and buckets[-1] + nbytes <= fusion_bytes:
            buckets[-1] += nbytes
        else:
            buckets.append(nbytes)
    return COMPUTE_NS + sum(map(bucket_ns, buckets))


class PlantedTransport(ThreadsTransport):
    """The threads' transport; each allreduce moves the clock on by what it is said to cost."""

    opened: ClassVar[list[tuple[int, object]]] = []  # (rank, what it was told of a knob of tests)

    def open(self, context: Context) -> None:
        self.opened.append((context.rank, context.settings.get("knock_bytes")))
        super().open(context)

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        self._spend(source.nbytes)
        return super().allreduce(source, target, op)

    def prepare(self, plan: Plan) -> Prepared:
        return _Planted(self, super().prepare(plan), sum(plan.counts) * plan.dtype.itemsize)

    def _spend(self, nbytes: int) -> None:
        if self.context.rank == 0:
            Clock.now_ns += bucket_ns(nbytes)


class _Planted(Prepared):
    def __init__(self, transport: PlantedTransport, inner: Prepared, nbytes: int) -> None:
        self._transport, self._inner, self._nbytes = transport, inner, nbytes

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        self._transport._spend(self._nbytes)
        return self._inner.start(sources, targets)

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        self._transport._spend(self._nbytes)
        return self._inner.run_atomic(sources, targets, real)

    def try_run_atomic(self, sources: Sequence[int], targets: Sequence[int], ticket: int) -> bool | None:
        done = self._inner.try_run_atomic(sources, targets, ticket)
        if done:
            self._transport._spend(self._nbytes)
        return done
