"""Runs a program in one process with plain torch: each rank's replica beside the others; knows no ddl.

Where a rank's gradients stand is kept in two parts: what ``param.grad`` has of reduced gradients, and what
this rank has computed since. A reduction adds the average or the sum of the second to the first.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tests.semantics.acting import (
    Entry,
    backward,
    edit,
    evaluation,
    failing,
    losses,
    metric,
    models,
    optimizer,
    thaw,
    values,
)
from tests.semantics.exchanges import received, verb_of
from tests.semantics.models import Raised
from tests.semantics.program import Between, Part, Pass, Program, Step, weight

__all__ = ["expected"]


def expected(program: Program) -> list[list[Entry]]:
    """What each rank must see, by rank."""
    return _Oracle(program).run()


class _Replica:
    """One part on one rank."""

    def __init__(self, part: Part, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.optimizer = optimizer(part, self.params)
        self.pending: list[torch.Tensor | None] = [None] * len(self.params)  # computed here and not reduced
        self.weight = 0  # of what is pending, where the average has weights


class _Oracle:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = range(program.size)
        self.models = [models(program) for _ in self.ranks]
        self.replicas = [[_Replica(part, model) for part, model in zip(program.parts, made)] for made in self.models]
        self.counts = [0] * len(program.parts)  # passes since the last reduction
        self.trace: list[list[Entry]] = [[] for _ in self.ranks]

    def run(self) -> list[list[Entry]]:
        for i, step in enumerate(self.program.steps):
            self._step(i, step)
        return self.trace

    def _step(self, i: int, step: Step) -> None:
        for failure in step.failures:
            for rank in failure.ranks:
                with contextlib.suppress(Raised):
                    failing(self.program, self.models[rank], failure, rank)
                for replica in self.replicas[rank]:
                    replica.optimizer.zero_grad(set_to_none=step.zero.endswith("none"))
        for p in step.zeroed:
            self._zero(p, step.zero)
        for p, b, required in step.thaws:
            for made in self.models:
                thaw(made[p], b, required)
        for j, (one, betweens) in enumerate(step.passes):
            self._pass(one, f"step {i}, pass {j}")
            for between in betweens:
                self._between(between, f"step {i}, after pass {j}")
        if step.way != "none":
            for p in step.stepping:
                self._reduce_pending(p)
                for _ in range(2 if step.way == "twice" else 1):
                    for rank in self.ranks:
                        self.replicas[rank][p].optimizer.step()
        for p in range(len(self.program.parts)):
            self._note(f"step {i}, parameters of part {p}", p, "parameters")

    def _zero(self, p: int, zero: str) -> None:
        self.counts[p] = 0
        for rank in self.ranks:
            replica = self.replicas[rank][p]
            replica.optimizer.zero_grad(set_to_none=zero.endswith("none"))
            replica.pending, replica.weight = [None] * len(replica.params), 0

    def _pass(self, one: Pass, label: str) -> None:
        computed = [losses(self.program, self.models[rank], one, rank) for rank in self.ranks]
        for k in range(len(computed[0])):
            for rank in self.ranks:
                self._backward(one, computed[rank][k], rank, retain=k < len(computed[0]) - 1)
            for p in one.touched:
                self.counts[p] += 1
                withheld = p in one.no_sync or self.counts[p] < self.program.parts[p].passes
                if not withheld:
                    self._reduce(p)
                self._note(f"{label}, loss {k}, part {p}", p, "pending" if withheld else "reduced")

    def _backward(self, one: Pass, loss: torch.Tensor, rank: int, retain: bool) -> None:
        """Adds what this backward computes to what is pending; where nothing will be reduced, plain torch is all."""
        before = [[param.grad for param in replica.params] for replica in self.replicas[rank]]
        active = [self._is_active(p, rank) for p in range(len(before))]
        for replica, is_active in zip(self.replicas[rank], active):
            for param in replica.params if is_active else ():
                param.grad = None
        backward(loss, one.way, retain)
        for p, (replica, grads, is_active) in enumerate(zip(self.replicas[rank], before, active)):
            factor = weight(one, rank) if self.program.parts[p].op == "weighted" and p in one.touched else 1
            replica.weight += factor if p in one.touched else 0
            for k, (param, grad) in enumerate(zip(replica.params, grads)) if is_active else ():
                if param.grad is not None and factor:  # rows of a sparse gradient of weight 0 are not there at all
                    replica.pending[k] = _added(replica.pending[k], factor * param.grad)
                param.grad = grad

    def _reduce_pending(self, p: int) -> None:
        if self.counts[p] or any(one is not None for row in self.replicas for one in row[p].pending):
            self._reduce(p)

    def _reduce(self, p: int) -> None:
        part = self.program.parts[p]
        self.counts[p] = 0
        members = [rank for rank in self.ranks if self._is_active(p, rank)]
        divisors = {"average": len(members), "sum": 1, "weighted": sum(self.replicas[r][p].weight for r in members)}
        for rank in members:
            self.replicas[rank][p].weight = 0
        for k in range(len(self.replicas[0][p].params)):
            total: torch.Tensor | None = None
            for rank in members:
                total = _added(total, self.replicas[rank][p].pending[k])
            if total is not None and divisors[part.op] != 1:
                total = total / divisors[part.op]
            for rank in members:
                replica = self.replicas[rank][p]
                param = replica.params[k]
                replica.pending[k] = None
                if not param.requires_grad:
                    continue
                if total is not None:
                    param.grad = _added(param.grad, total.detach().clone())
                elif param.grad is None:
                    zeros = torch.zeros_like(param)
                    param.grad = zeros.to_sparse(1) if part.optimizer == "sparse adam" else zeros

    def _is_active(self, p: int, rank: int) -> bool:
        members = self.program.parts[p].members or tuple(self.ranks)
        return rank in members and len(members) > 1

    def _between(self, between: Between, label: str) -> None:
        if between.what == "metric":
            tensors = [metric(between, rank) for rank in self.ranks]
            total = torch.stack(tensors).sum(0)
            if between.kind.startswith("float"):
                total = total / len(tensors)
            for rank in self.ranks:
                self.trace[rank].append(Entry(f"{label}, metric", (total.numpy(),), tuple(self.ranks)))
        elif between.what == "exchange":
            members = self.program.parts[between.part].members or tuple(self.ranks)
            alike = members if verb_of(between) not in ("alltoall", "reducescatter", "grouped reducescatter") else ()
            for rank in members:
                got = received(between, rank, members)
                self.trace[rank].append(Entry(f"{label}, {between.kind}", got, tuple(alike)))
        elif between.what == "evaluate":
            for rank in self.ranks:
                loss = evaluation(self.models[rank], between, rank)
                self.trace[rank].append(Entry(f"{label}, evaluation", (loss.numpy(),), ()))
        elif between.what != "synchronize":
            for rank in self.ranks:
                edit(between, self.models[rank][between.part])

    def _note(self, label: str, p: int, what: str) -> None:
        members = self.program.parts[p].members or tuple(self.ranks)
        for rank in self.ranks:
            replica = self.replicas[rank][p]
            tensors: list[torch.Tensor | None] = list(replica.params)
            if what != "parameters":
                tensors = [_added(param.grad, pending) for param, pending in zip(replica.params, replica.pending)]
            if what == "pending" and (
                self.program.parts[p].op == "weighted"
                or (self.program.parts[p].op == "sum" and any(p.grad is not None for p in replica.params))
            ):
                tensors = []  # what was summed before may be kept elsewhere until all is: only what is new goes again
            alike = members if what != "pending" and rank in members else ()
            self.trace[rank].append(Entry(label, values(tensors, replica.params), alike))


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return other + one if one.is_sparse and not other.is_sparse else one + other
