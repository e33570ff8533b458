"""Eight mutants of shared memory, as a plugin: each has one fault, which one standard test must find."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.builtin.shm.transport import ShmTransport
from ddlcore.contracts.transport import DONE, Plan, Prepared, Transport, Work, view
from ddlcore.hooks import AdapterProvider, TransportProvider, hookimpl
from ddlcore.testing import TransportSuite
from ddlcore.testing.builtin import NumpySuite
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["MUTANTS", "StridedSuite", "Suites", "ddl_adapters", "ddl_transports"]

CHUNK = 128 << 10  # bytes, as the suite tries sizes around it


class DropsAChunk(ShmTransport):
    """Never moves the second chunk of a large tensor."""

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        begin, end = CHUNK, min(2 * CHUNK, target.nbytes)
        kept = bytes(view(target.address, target.nbytes)[begin:end])
        work = super().allreduce(source, target, op)
        if kept:
            view(target.address, target.nbytes)[begin:end] = kept
        return work


class WrongDivisor(ShmTransport):
    """Averages over one rank too many."""

    def prepare(self, plan: Plan) -> Prepared:
        if plan.postscale != 1.0:
            plan = replace(plan, postscale=plan.postscale * self.context.size / (self.context.size + 1))
        return super().prepare(plan)


class IgnoresNothing(ShmTransport):
    """A rank that has nothing to give does not take part."""

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return DONE if source.count == 0 else super().allgatherv(source, target, counts)


class HangsInAbort(ShmTransport):
    """Waits for ever for what it should have ended."""

    def abort(self) -> None:
        threading.Event().wait()


class SwapsCollectives(ShmTransport):
    """Of two plans, each runs in the other's place."""

    def prepare(self, plan: Plan) -> Prepared:
        now = super().prepare(plan)
        before, self._before = getattr(self, "_before", now), now
        return before


class LeaksASegment(ShmTransport):
    """Forgets its memory in place of giving it back."""

    leaked: list[object] = []  # noqa: RUF012  # that is the fault

    def close(self) -> None:
        self.leaked.append(self._segment)
        self._segment = None
        super().close()


class UnequalTails(ShmTransport):
    """The last rank's tail, what is left over after whole blocks of 64, stays as it was."""

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        tail = target.count % 64 * target.dtype.itemsize
        kept = bytes(view(source.address, source.nbytes)[source.nbytes - tail :])
        work = super().allreduce(source, target, op)
        if tail and self.context.rank == self.context.size - 1:
            view(target.address, target.nbytes)[target.nbytes - tail :] = kept
        return work


class StridedTaken(NumpyAdapter):
    """Takes an array with gaps for a dense one: shared memory, which gets addresses and counts, would never know."""

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if isinstance(tensor, np.ndarray) and tensor.dtype == np.float32 and not tensor.flags.c_contiguous:
            return Buffer(tensor.ctypes.data, tensor.size, DType.F32, tensor.shape, owner=tensor)
        return super().buffer(tensor, elementwise=elementwise)


MUTANTS: dict[str, tuple[type[Transport] | type[NumpyAdapter], str, str]] = {  # name -> class, test, what it says
    "drops-a-chunk": (DropsAChunk, "test_large_allreduce", "elements differ"),
    "wrong-divisor": (WrongDivisor, "test_plans_are_scaled", "elements differ"),
    "ignores-nothing": (IgnoresNothing, "test_allgatherv", "did not end within 2 s|elements differ"),
    "hangs-in-abort": (HangsInAbort, "test_abort_ends_a_pending_call[barrier]", "abort did not return"),
    "strided-taken": (StridedTaken, "test_tensors_with_gaps_are_refused", "DID NOT RAISE"),
    "swaps-collectives": (SwapsCollectives, "test_prepared_plans_run_again", "raised on|differ|ValueError"),
    "leaks-a-segment": (LeaksASegment, "test_nothing_stays", "left behind after close"),
    "unequal-tails": (UnequalTails, "test_allreduce", "rank 1 of 2: .* elements differ"),
}


class Patient(TransportSuite):
    """Two ranks and three, with little patience."""

    sizes = (2, 3)
    deadline_s = 2.0
    __test__ = False


class Suites:
    """One for each mutant, under its class's name."""


for mutant, _, _ in MUTANTS.values():
    if issubclass(mutant, Transport):
        made = {"make": lambda self, size, mutant=mutant: [mutant() for _ in range(size)]}
        setattr(Suites, mutant.__name__, type(mutant.__name__, (Patient,), made))


class StridedSuite(NumpySuite):
    """Of the one that is an adapter."""

    adapter = StridedTaken()
    __test__ = False


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """All that are transports."""
    return [
        TransportProvider(name, f"{__name__}:{mutant.__name__}", suite=f"{__name__}:Suites.{mutant.__name__}")
        for name, (mutant, _, _) in MUTANTS.items()
        if issubclass(mutant, Transport)
    ]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """The one that is not."""
    return [AdapterProvider("strided-taken", f"{__name__}:StridedTaken", suite=f"{__name__}:StridedSuite")]
