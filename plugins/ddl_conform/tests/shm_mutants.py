"""Eight mutants of shared memory, as a plugin: each has one fault, which one standard test must find."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from ddl_shm.transport import ShmTransport

from ddlcore.contracts.transport import DONE, Plan, Prepared, Work, view
from ddlcore.hooks import TransportProvider, hookimpl
from ddlcore.testing import TransportSuite
from ddlcore.types import Buffer, ReduceOp

__all__ = ["MUTANTS", "Suites", "ddl_transports"]

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


class StridedTaken(ShmTransport):
    """Takes memory with gaps for dense memory."""

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return super().allreduce(replace(source, strides=None), replace(target, strides=None), op)


class SwapsCollectives(ShmTransport):
    """Exchanges the parts where they are to be reduced, and reduces them where they are to be exchanged."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        parts = self._temporary(counts[self.context.rank] * self.context.size, source.dtype)
        work = super().alltoallv(source, parts, [counts] * self.context.size)
        view(target.address, target.nbytes)[:] = view(parts.address, target.nbytes)
        return work

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        if any(row != counts[0] for row in counts):  # no reduction has these sizes
            return super().alltoallv(source, target, counts)
        part = replace(target, count=counts[0][self.context.rank])
        return super().reducescatterv(source, part, counts[0], ReduceOp.Sum)


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


MUTANTS: dict[str, tuple[type[ShmTransport], str, str]] = {  # name -> class, test that it fails, what that says
    "drops-a-chunk": (DropsAChunk, "test_large_allreduce", r"allreduce sum .*: rank \d of \d: .*elements differ"),
    "wrong-divisor": (WrongDivisor, "test_plans_are_scaled", r"prepared sum .*: rank \d of \d: .*elements differ"),
    "ignores-nothing": (IgnoresNothing, "test_allgatherv", "did not end within 2 s|elements differ"),
    "hangs-in-abort": (HangsInAbort, "test_abort_ends_a_pending_call[barrier]", "abort did not return"),
    "strided-taken": (StridedTaken, "test_memory_with_gaps_is_refused", r"allreduce .*: rank \d took memory with gaps"),
    "swaps-collectives": (SwapsCollectives, "test_reducescatterv", r"reducescatterv .*: rank \d .*elements differ"),
    "leaks-a-segment": (LeaksASegment, "test_nothing_stays", "left behind after close: {'descriptors'"),
    "unequal-tails": (UnequalTails, "test_allreduce", "rank 1 of 2: .* elements differ"),
}


class Patient(TransportSuite):
    """Two ranks and three."""

    sizes = (2, 3)
    __test__ = False


class Impatient(Patient):
    """For mutants that hang: what is wrong with them is that the time passes."""

    deadline_s = 2.0
    abort_s = 1.0


class Suites:
    """One for each of them, under its class's name."""


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Each with a suite of its own, and the one that has no fault."""
    tried: dict[str, type[ShmTransport]] = {
        **{name: mutant for name, (mutant, _, _) in MUTANTS.items()},
        "without-a-fault": ShmTransport,
    }
    for mutant in tried.values():
        made = {"make": lambda self, size, mutant=mutant: [mutant() for _ in range(size)]}
        base = Impatient if mutant in (IgnoresNothing, HangsInAbort) else Patient
        setattr(Suites, mutant.__name__, type(mutant.__name__, (base,), made))
    return [
        TransportProvider(name, f"{__name__}:{mutant.__name__}", suite=f"{__name__}:Suites.{mutant.__name__}")
        for name, mutant in tried.items()
    ]
