"""Two models of the training benchmark in Gluon, as in torch, with synthetic batches; knows nothing of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mxnet as mx
from mxnet import gluon

__all__ = ["WORKLOADS", "Batch", "Workload"]

Batch = tuple[Any, Any]  # inputs, classes
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, and the input of one rank's step. ``samples`` is a rank's batch size."""

    name: str
    samples: int
    make: Callable[[], Any]
    batch: Callable[[int, Any], Batch]


def _chain(sizes: list[int]) -> Any:
    """Return dense layers with ReLU between them, compiled into one graph.

    Kaiming initialization keeps the gradients from vanishing.
    """
    net = gluon.nn.HybridSequential()
    for inputs, outputs in pairwise(sizes):
        net.add(gluon.nn.Dense(outputs, activation="relu" if outputs != CLASSES else None, in_units=inputs))
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    net.hybridize()
    return net


def _wide() -> Any:
    return _chain([3072, 4096, 4096, 1024, CLASSES])


def _deep() -> Any:
    """Return 200 layers and a head."""
    return _chain([64] * 201 + [CLASSES])


def _vectors(length: int) -> Callable[[int, Any], Batch]:
    def batch(samples: int, random: Any) -> Batch:
        return mx.nd.array(random.randn(samples, length)), mx.nd.array(random.randint(CLASSES, size=samples))

    return batch


WORKLOADS = {
    workload.name: workload
    for workload in (Workload("wide", 8, _wide, _vectors(3072)), Workload("deep", 8, _deep, _vectors(64)))
}
