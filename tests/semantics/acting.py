"""What a rank of a program and the process to compare with have in common: forward, losses, edits, traces; knows no ddl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.semantics.models import WIDTH, Model, Raised, build
from tests.semantics.program import Between, Failure, Part, Pass, Program, batch

__all__ = [
    "Entry",
    "backward",
    "differ",
    "edit",
    "evaluation",
    "failing",
    "losses",
    "metric",
    "models",
    "optimizer",
    "thaw",
    "values",
]

TOLERANCE = 1e-10
DIVERGED = 1e6  # a program whose values have become so large makes of rounding what it likes


@dataclass(frozen=True)
class Entry:
    """What a rank saw at one moment."""

    label: str
    values: tuple[np.ndarray[Any, Any], ...]
    ranks: tuple[int, ...]  # those that must have the very same bits


def models(program: Program) -> list[Model]:
    return [build(part.blocks, 10 * program.seed + p) for p, part in enumerate(program.parts)]


def optimizer(part: Part, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if part.optimizer == "adam":
        # Some gradients are 0 but for rounding (of what a LayerNorm takes away), and a smaller eps would make much of that.
        return torch.optim.Adam(params, lr=0.01, eps=1e-3)
    if part.optimizer == "sparse adam":
        return torch.optim.SparseAdam(list(params), lr=0.01, eps=1e-3)
    return torch.optim.SGD(
        params, lr=0.001 if part.op == "sum" else 0.01, momentum=0.9 if part.optimizer == "momentum" else 0.0
    )


def losses(program: Program, made: Sequence[Model], one: Pass, rank: int) -> list[torch.Tensor]:
    """What ``rank`` computes in this pass: one loss, or two of one graph."""
    x, ids, target = batch(one.seed, rank, one.rows[rank])
    left_out = one.left_out[rank] if one.left_out else ()
    inner = None
    for p in one.parts:
        if one.detached and p == one.parts[-1]:
            x = x.detach()
        if one.penalty and p == one.touched[0]:
            x = inner = x.detach().requires_grad_(True) if p == one.parts[0] or one.detached else x
        x = made[p](x, ids, [b for part, b in left_out if part == p])
    loss = one.scale * (x - target).square().mean()
    if inner is not None:
        (slope,) = torch.autograd.grad(x.sum(), inner, create_graph=True)
        loss = loss + one.scale * slope.square().mean()
    return [loss, torch.tanh(x).mean()] if one.twice else [loss]


def backward(loss: torch.Tensor, way: str, retain: bool) -> None:
    if way == "method":
        loss.backward(retain_graph=retain)
    elif way == "function":
        torch.autograd.backward(loss, torch.ones((), dtype=torch.float64), retain_graph=retain)
    else:
        torch.autograd.backward([loss / 2, loss / 2], retain_graph=retain)


def failing(program: Program, made: Sequence[Model], failure: Failure, rank: int) -> None:
    """Raises Raised from forward or from backward."""
    x, ids, target = batch(failure.seed, rank, 2)
    for p, model in enumerate(made):
        block = failure.block if p == failure.part else -1
        x = model(
            x, ids, boom=block if failure.where == "backward" else -1, fails=block if failure.where == "forward" else -1
        )
    (x - target).square().mean().backward()
    raise Raised("after all")


def edit(between: Between, model: nn.Module) -> None:
    """Changes reduced gradients, on every rank alike."""
    params = [param for param in model.parameters() if param.grad is not None]
    grads: list[torch.Tensor] = [param.grad for param in params if param.grad is not None]
    if between.what == "clip":
        nn.utils.clip_grad_norm_(params, 0.1)
    elif between.what == "clip values":
        nn.utils.clip_grad_value_(params, 0.05)
    elif between.what == "scale":
        for grad in grads:
            grad.div_(4.0) if not grad.is_sparse else grad._values().div_(4.0)
    elif between.what == "noise":
        random = torch.Generator().manual_seed(between.seed)
        for grad in grads:
            grad.add_(torch.randn(grad.shape, generator=random, dtype=torch.float64), alpha=0.01)


def evaluation(made: Sequence[Model], between: Between, rank: int) -> torch.Tensor:
    """A loss without a graph, of a batch whose size depends on the rank."""
    x, ids, target = batch(between.seed, rank, 1 + rank)
    with torch.no_grad():
        for model in made:
            model.eval()
            x = model(x, ids)
            model.train()
    return (x - target).square().mean()


def metric(between: Between, rank: int) -> torch.Tensor:
    if between.kind.startswith("integer"):
        return torch.arange(3) + 10 * rank + between.seed
    return torch.linspace(0.0, 1.0, WIDTH, dtype=torch.float64) * (rank + 1) + between.seed


def thaw(model: Model, block: int, required: bool) -> None:
    model.blocks[block].requires_grad_(required)


def values(tensors: Sequence[torch.Tensor | None], shapes: Sequence[torch.Tensor]) -> tuple[np.ndarray[Any, Any], ...]:
    """Copies; no gradient is zeros, and one that is sparse is made dense."""
    found = []
    for tensor, like in zip(tensors, shapes):
        dense = torch.zeros_like(like) if tensor is None else tensor.detach()
        found.append((dense.to_dense() if dense.is_sparse else dense).contiguous().numpy().copy())
    return tuple(found)


def _same_moment(trace: Sequence[Entry], i: int, other: Sequence[Entry]) -> Entry:
    """Return the entry of the trace ``other`` that was made at the same moment as entry ``i`` of ``trace``.

    Its index may differ from ``i``, because only the members of a process set have entries of its collectives.
    """
    label = trace[i].label
    before = sum(entry.label == label for entry in trace[:i])
    return [entry for entry in other if entry.label == label][before]


def differ(expected: Sequence[Entry], by_rank: Callable[[int], Sequence[Entry]], rank: int) -> str:
    """Where the trace of ``rank`` first differs from what is expected, or from that of a rank with the same bits; or ""."""
    found = by_rank(rank)
    for i, (want, have) in enumerate(zip(expected, found)):
        if want.label != have.label:
            return f"rank {rank} came to {have.label!r}, not to {want.label!r}"
        for j, (a, b) in enumerate(zip(want.values, have.values)):  # of nothing where nothing is promised
            if a.shape != b.shape:
                return f"rank {rank}, {want.label}, tensor {j}: shape {b.shape}, not {a.shape}"
            if not np.abs(a).max(initial=0.0) < DIVERGED:
                return ""
            distance = float(np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0.0))
            if distance > TOLERANCE * max(1.0, float(np.abs(a).max(initial=0.0))):
                return f"rank {rank}, {want.label}, tensor {j} is {distance:.3g} off:\nit is     {b}\nexpected: {a}"
            first = want.ranks[0] if want.ranks else rank
            if rank in want.ranks and (b != _same_moment(found, i, by_rank(first)).values[j]).any():
                return f"rank {rank}, {want.label}, tensor {j}: other bits than on rank {first}"
    if len(expected) != len(found):
        return f"rank {rank} came {len(found)} steps far, not {len(expected)}"
    return ""
