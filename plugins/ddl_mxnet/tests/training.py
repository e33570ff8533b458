"""Trains one small Gluon network in one process or on the ranks of a world, and compares the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ddlcore.testing import run_world

__all__ = ["ROWS", "STEPS", "Network", "Part", "agree", "differences", "values"]

ROWS = 8  # of a global batch
STEPS = 10


class Network(gluon.HybridBlock):  # type: ignore[misc]  # MXNet has no types
    """A network of two branches, so that a rank can leave one of them out."""

    def __init__(self, kind: str = "float64") -> None:
        super().__init__()
        with self.name_scope():
            self.body = gluon.nn.Dense(8, in_units=6, activation="tanh", dtype=kind)
            self.left = gluon.nn.Dense(3, in_units=8, dtype=kind)
            self.right = gluon.nn.Dense(3, in_units=8, dtype=kind)
        self.initialize()
        random = np.random.RandomState(3)  # MXNet's own generator is shared by all threads
        for parameter in self.collect_params().values():
            parameter.set_data(mx.nd.array(random.randn(*parameter.shape) / 3, dtype=kind))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        hidden = self.body(x)
        return self.left(hidden) + self.right(hidden)

    def leave_right_out(self, x: Any) -> Any:
        """Return the output without the right branch."""
        return self.left(self.body(x))


class Part:
    """What one rank of ``size`` trains on: its rows of each global batch. ``size`` 1 is the process to compare with."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        self.rank = rank
        self.size = size
        self.kind = kind
        self.net: Any = Network(kind)
        self.begun: list[Any] = []

    def trainer(self, **options: Any) -> Any:
        """Return the distributed trainer, or Gluon's own in the process to compare with."""
        parameters = self.net.collect_params()
        self.begun = values(self.net)
        optimizer, settings = options.pop("optimizer", ("sgd", {"learning_rate": 0.1, "momentum": 0.9}))
        if self.size == 1:
            return gluon.Trainer(parameters, optimizer, settings, kvstore=None)
        return ddl.DistributedTrainer(parameters, optimizer, settings, **options)

    def shards(self, step: int, size: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield (rank, inputs, targets) for the rows of every rank in a step."""
        random = np.random.RandomState(step)
        x, y = random.randn(ROWS, 6), random.randn(ROWS, 3)
        rows = ROWS // size
        for rank in range(size):
            own = slice(rank * rows, (rank + 1) * rows)
            yield rank, mx.nd.array(x[own], dtype=self.kind), mx.nd.array(y[own], dtype=self.kind)

    def mine(self, step: int, size: int = 2) -> Iterator[tuple[int, Any, Any]]:
        """Yield what this process computes: its own rows, or in the process to compare with those of all ranks."""
        for rank, x, y in self.shards(step, size):
            if self.size == 1 or rank == self.rank:
                yield rank, x, y

    def backward(self, step: int, forward: Callable[[int, Any], Any] | None = None) -> int:
        """Compute gradients of a step, of a sum over rows; return the number of rows."""
        losses = []
        with autograd.record():
            for rank, x, y in self.mine(step):
                out = self.net(x) if forward is None else forward(rank, x)
                losses.append(((out - y) ** 2).sum())
        autograd.backward(losses)
        return ROWS // self.size


def values(net: Any) -> list[Any]:
    """Return copies of all parameters."""
    return [parameter.data().asnumpy().copy() for parameter in net.collect_params().values()]


def differences(one: list[Any], other: list[Any]) -> float:
    """Return the greatest distance between parameters; infinite if a value is not a number."""
    distances = [np.abs(a.astype(float) - b.astype(float)).max() for a, b in zip(one, other, strict=True)]
    return float(np.nan_to_num(np.array(distances), nan=np.inf).max())


def agree(train: Callable[[Part], Any], *, size: int = 2, tolerance: float = 1e-12, kind: str = "float64") -> list[Any]:
    """Run ``train`` in one process and on a world of ``size`` ranks, and compare the parameters.

    Returns what ``train`` returned on each rank. Raises AssertionError if a rank's parameters differ.
    """
    alone = Part(0, 1, kind)
    train(alone)
    expected = values(alone.net)
    assert differences(alone.begun, expected) > 1e-3, "nothing was learned, so the test shows nothing"

    def play(rank: int, job: Any) -> tuple[Any, list[Any]]:
        part = Part(rank, size, kind)
        return train(part), values(part.net)

    results = run_world(size, play, backend="threads")
    for rank, (_, found) in enumerate(results):
        distance = differences(expected, found)
        assert distance <= tolerance, f"rank {rank} of {size} is {distance:.3g} away from one process"
        assert differences(found, results[0][1]) == 0.0, f"ranks 0 and {rank} differ"
    return [result for result, _ in results]
