"""Runs a program on one rank with ddl, as a user's script would, and notes what it sees; knows no other rank."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ddl_torch as ddl
import numpy as np
import torch

import ddlcore
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
from tests.semantics.exchanges import array, given, root_of, splits_of
from tests.semantics.models import Raised
from tests.semantics.program import Between, Failure, Pass, Program, Step, weight

__all__ = ["act"]

_OURS = tuple(str(Path(str(module.__file__)).parent) for module in (ddl, ddlcore))
_AFTER_STEP = ("_after_step", "_any_stepped", "stepped")  # hooks that torch calls behind a step
_TRIES = 50  # of what interrupts call away
_AGAIN_S = 100e-6  # between the signals of one interrupted call


class Interrupted(Exception):
    """What the handler of a signal raises while ddl's code is running."""


def act(program: Program, rank: int) -> list[Entry]:
    """All that ``rank`` sees. It is a rank of a world of ``program.size`` already."""
    return _Actor(program, rank).run()


class _Actor:
    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.models = models(program)
        self.trace: list[Entry] = []
        self.sets: list[Any] = []
        if program.begins == "broadcast":
            self._begin_elsewhere()
        self.optimizers: list[Any] = []
        for p, part in enumerate(program.parts):
            named: Any = None
            if part.names != "none":
                prefix = f"part{p}." if part.names == "own" else ""
                named = [(prefix + name, param) for name, param in self.models[p].named_parameters()]
            options: dict[str, Any] = {}
            if part.members:
                known = [one for one in self.sets if tuple(one.ranks) == tuple(part.members)]
                if not known:
                    known = [ddl.add_process_set(part.members)]
                    self.sets += known
                options["process_set"] = known[0]
            wrapped = ddl.DistributedOptimizer(
                optimizer(part, list(self.models[p].parameters())),
                named_parameters=named,
                backward_passes_per_step=part.passes,
                op=ddl.Sum if part.op == "sum" else ddl.Average,
                weight=1 if part.op == "weighted" else None,
                gradient_predivide_factor=part.predivide,
                groups=part.groups or None,
                sparse_as_dense=part.sparse_as_dense,
                **options,
            )
            self.optimizers.append(wrapped)
        self.counts = [0] * len(program.parts)

    def _begin_elsewhere(self) -> None:
        for model in self.models:
            if self.rank:
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(self.rank)
            ddl.broadcast_parameters(model.state_dict(), 0)

    def run(self) -> list[Entry]:
        for i, step in enumerate(self.program.steps):
            self._step(i, step)
        for one in self.sets:
            ddl.remove_process_set(one)
        return self.trace

    def _step(self, i: int, step: Step) -> None:
        for failure in step.failures:
            if self.rank in failure.ranks:
                self._fail(failure, step.zero.endswith("none"))
        for p in step.zeroed:
            self._zero(p, step.zero)
        for p, b, required in step.thaws:
            thaw(self.models[p], b, required)
        if step.way == "closure":
            one = step.passes[0][0]
            for p in step.stepping:
                self.optimizers[p].step(lambda: self._pass(one, f"step {i}, pass 0"))
        else:
            for j, (one, betweens) in enumerate(step.passes):
                self._pass(one, f"step {i}, pass {j}")
                for between in betweens:
                    self._between(between, f"step {i}, after pass {j}")
            for p in step.stepping:
                self._take(step, p)
        for p in range(len(self.program.parts)):
            self._note(f"step {i}, parameters of part {p}", p, "parameters")

    def _fail(self, failure: Failure, to_none: bool) -> None:
        with contextlib.suppress(Raised):
            failing(self.program, self.models, failure, self.rank)
        for wrapped in self.optimizers:
            try:
                wrapped.zero_grad(set_to_none=to_none)
            except RuntimeError:  # some gradients have been sent: end the round
                with contextlib.suppress(ddl.IncompleteGradients, ddl.MismatchError):
                    wrapped.synchronize()
                wrapped.zero_grad(set_to_none=to_none)
        self.counts = [0] * len(self.counts)

    def _zero(self, p: int, zero: str) -> None:
        self.counts[p] = 0
        who = self.optimizers[p] if zero.startswith("optimizer") else self.models[p]
        who.zero_grad(set_to_none=zero.endswith("none"))

    def _take(self, step: Step, p: int) -> None:
        wrapped = self.optimizers[p]
        if step.way == "none":
            return
        self.counts[p] = 0
        if step.way == "synchronize, skip":
            wrapped.synchronize()
        if step.way in ("skip", "synchronize, skip"):
            with wrapped.skip_synchronize():
                wrapped.step()
            return
        after_us = dict(step.interrupted).get(self.rank, 0)
        _through(wrapped.step, wrapped.step, after_us)
        if step.way == "twice":
            wrapped.step()

    def _pass(self, one: Pass, label: str) -> torch.Tensor:
        computed = losses(self.program, self.models, one, self.rank)
        for k, loss in enumerate(computed):
            retain = k < len(computed) - 1
            with contextlib.ExitStack() as stack:
                for p in one.no_sync:
                    stack.enter_context(self.optimizers[p].no_sync())
                after_us = dict(one.interrupted).get(self.rank, 0)
                for p in one.touched:
                    if self.program.parts[p].op == "weighted":
                        self.optimizers[p].weight = weight(one, self.rank)
                try:
                    _through(functools.partial(backward, loss, one.way, retain), self._settle, after_us)
                except ddl.IncompleteGradients:
                    if not after_us:
                        raise
                    self._compute_again(one)
            for p in one.touched:
                self.counts[p] += 1
                withheld = p in one.no_sync or self.counts[p] < self.program.parts[p].passes
                if not withheld:
                    self.counts[p] = 0
                self._note(f"{label}, loss {k}, part {p}", p, "pending" if withheld else "reduced")
        return computed[0]

    def _compute_again(self, one: Pass) -> None:
        """Do what IncompleteGradients asks for: an interrupt struck before ddl knew that backward was over."""
        for wrapped in self.optimizers:
            wrapped.zero_grad()
        (loss,) = losses(self.program, self.models, one, self.rank)  # an interrupted pass has one loss
        backward(loss, one.way, False)

    def _settle(self) -> None:
        for wrapped in self.optimizers:
            wrapped.synchronize()

    def _between(self, between: Between, label: str) -> None:
        if between.what == "metric":
            name = None if between.kind.endswith("no name") else f"metric {between.kind}"
            op = ddl.Average if between.kind.startswith("float") else ddl.Sum
            result = ddl.allreduce(metric(between, self.rank), name=name, op=op)
            self.trace.append(Entry(f"{label}, metric", (result.numpy(),), ()))
        elif between.what == "exchange":
            members = self.program.parts[between.part].members
            if not members or self.rank in members:
                got = self._exchange(between, tuple(members) or tuple(range(self.program.size)))
                self.trace.append(Entry(f"{label}, {between.kind}", got, ()))
        elif between.what == "evaluate":
            loss = evaluation(self.models, between, self.rank)
            self.trace.append(Entry(f"{label}, evaluation", (loss.numpy(),), ()))
        elif between.what == "synchronize":
            self.optimizers[between.part].synchronize()
        else:
            edit(between, self.models[between.part])

    def _exchange(self, between: Between, members: tuple[int, ...]) -> tuple[Any, ...]:
        """Run the collective that ``between`` describes, and return its results as arrays."""
        verb, _, how = between.kind.partition(",")
        where: dict[str, Any] = {"name": None if "no name" in how else f"exchange {verb}"}
        known = [one for one in self.sets if tuple(one.ranks) == members]
        if known:
            where["process_set"] = known[0]
        root, tensor = root_of(between, members), given(between, self.rank, members)
        splits, added = splits_of(between, self.rank, members), {"op": ddl.Sum}
        if verb == "barrier":
            ddl.barrier(where.get("process_set", ddl.global_process_set))
            return ()
        if verb == "object":
            sent = [between.seed, root] if self.rank == root else None
            return (np.array(ddl.broadcast_object(sent, root, **where)),)
        if verb == "objects":
            return (np.array(ddl.allgather_object(between.seed + self.rank, **where)),)
        more: dict[str, tuple[Any, ...]] = {"broadcast": (root,), "broadcast_": (root,), "alltoall": (splits,)}
        if verb.endswith("reducescatter"):
            where |= added
        if verb.startswith("grouped"):
            pair = [tensor, given(between, self.rank, members, 1)]
            verb = verb.replace(" ", "_")
            return tuple(array(one) for one in getattr(ddl, verb)(pair, **where))
        if "async" not in how:
            result = getattr(ddl, verb)(tensor, *more.get(verb, ()), **where)
        else:
            handle = getattr(ddl, f"{verb}_async")(tensor, *more.get(verb, ()), **where)
            wait = functools.partial(ddl.synchronize, handle)
            _through(wait, wait, dict(between.interrupted).get(self.rank, 0))
            result = wait()
        return tuple(array(one) for one in (result if isinstance(result, tuple) else (result,)))

    def _note(self, label: str, p: int, what: str) -> None:
        params = list(self.models[p].parameters())
        tensors = [param if what == "parameters" else param.grad for param in params]
        self.trace.append(Entry(label, values(tensors, params), ()))


# --- signals


def _through(call: Callable[[], Any], again: Callable[[], Any], after_us: int) -> None:
    """``call``, and after an interrupt ``again`` until one is not interrupted. ``after_us`` 0: there are no interrupts."""
    if not after_us:
        call()
        return
    with _signals(after_us):
        for _ in range(_TRIES):
            try:
                call()
                return
            except Interrupted:
                call = again
    call()


@contextlib.contextmanager
def _signals(after_us: int) -> Iterator[None]:
    """Signals whose handler raises where it interrupts ddl, the first after so many microseconds."""
    before = signal.signal(signal.SIGALRM, _on_signal)
    signal.setitimer(signal.ITIMER_REAL, after_us * 1e-6, _AGAIN_S * (1 + after_us % 7))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Raises if ddl is what was interrupted.

    Not in a hook of a single gradient: an exception there ends a backward that has not computed all, which
    nothing can continue. Not in torch's own step, wherever that was called from: it changes parameters in place.
    Nor behind it: whether it was taken, an interrupted program cannot tell.
    """
    if torch._C._current_autograd_node() is not None:
        return
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if any(one.f_code.co_name in _AFTER_STEP for one in frames):
        return
    for one in frames:
        name = one.f_code.co_filename
        if name.startswith(_OURS):
            raise Interrupted
        if f"{torch.__name__}/optim/" in name and one.f_code.co_name != "wrapper":
            return
