"""Trains one small network in one process or on the ranks of a world, and compares the resulting parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddl_torch as ddl
import torch
from torch import nn

from ddlcore.testing import run_world

__all__ = ["ROWS", "Network", "Part", "agree", "backward", "differences", "failing_at", "parameters"]

ROWS = 8  # of a global batch
STEPS = 10


def backward(loss: torch.Tensor) -> None:
    loss.backward()


class Network(nn.Module):
    """A network of two branches, so that a rank can leave one of them out."""

    def __init__(self, kind: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8, dtype=kind)
        self.left = nn.Linear(8, 3, dtype=kind)
        self.right = nn.Linear(8, 3, dtype=kind)
        random = torch.Generator().manual_seed(3)  # torch's own generator is shared by all threads
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor, use_right: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        out: torch.Tensor = self.left(hidden)
        return out + self.right(hidden) if use_right else out


class Part:
    """What one rank of ``size`` trains on: its rows of each global batch. ``size`` 1 is the process to compare with."""

    def __init__(self, rank: int, size: int, kind: torch.dtype = torch.float64) -> None:
        self.rank = rank
        self.size = size
        self.kind = kind
        self.model: Any = Network(kind)
        self.begun: list[torch.Tensor] = []

    def wrap(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Return the distributed optimizer, or the bare optimizer in the process to compare with."""
        self.begun = parameters(self.model)
        if self.size == 1:
            return optimizer
        options.setdefault("named_parameters", self.model.named_parameters())
        return ddl.DistributedOptimizer(optimizer, **options)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's (inputs, targets) of a step."""
        (shard,) = [shard for rank, shard in self.shards(step, self.size) if rank == self.rank]
        return shard

    def shards(self, step: int, size: int) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield (rank, rows) for every rank; the process to compare with computes them one after another."""
        random = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 6, generator=random, dtype=torch.float64).to(self.kind)
        y = torch.randn(ROWS, 3, generator=random, dtype=torch.float64).to(self.kind)
        rows = ROWS // size
        for rank in range(size):
            yield rank, (x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows])

    def mine(self, step: int, size: int = 2) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the (rank, rows) that this process computes: its own, or those of all ranks if it compares."""
        for rank, shard in self.shards(step, size):
            if self.size == 1 or rank == self.rank:
                yield rank, shard

    def share(self, size: int = 2) -> float:
        """Return the weight of a rank's mean loss in the process to compare with."""
        return 1.0 / size if self.size == 1 else 1.0

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return nn.functional.mse_loss(self.model(x), y)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the greatest distance between parameters; infinite if a value is not a number."""
    distances = [(a.double() - b.double()).abs().max() for a, b in zip(one, other, strict=True)]
    return torch.stack(distances).nan_to_num(nan=float("inf")).max().item()


def agree(
    train: Callable[[Part], Any],
    *,
    size: int = 2,
    tolerance: float = 1e-12,
    kind: torch.dtype = torch.float64,
    backend: str = "threads",
) -> list[Any]:
    """Run ``train`` in one process and on a world of ``size`` ranks, and compare the parameters.

    Returns what ``train`` returned on each rank. Raises AssertionError if a rank's parameters differ.
    """
    alone = Part(0, 1, kind)
    train(alone)
    expected = parameters(alone.model)
    assert differences(alone.begun, expected) > 1e-3, "nothing was learned, so the test shows nothing"

    def play(rank: int, job: Any) -> tuple[Any, list[torch.Tensor]]:
        part = Part(rank, size, kind)
        return train(part), parameters(part.model)

    results = run_world(size, play, backend=backend)
    for rank, (_, found) in enumerate(results):
        distance = differences(expected, found)
        assert distance <= tolerance, f"rank {rank} of {size} is {distance:.3g} away from one process"
        assert differences(found, results[0][1]) == 0.0, f"ranks 0 and {rank} differ"
    return [result for result, _ in results]


def failing_at(param: torch.Tensor, when: Callable[[], bool]) -> None:
    """Make the backward pass fail at the gradient of ``param`` whenever ``when()`` is true."""

    def fail(_: torch.Tensor) -> None:
        if when():
            raise ArithmeticError("planted")

    param.register_hook(fail)
