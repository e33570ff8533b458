"""Two of the benchmark's models in Keras, with synthetic batches; knows nothing of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

__all__ = ["BATCHES", "WORKLOADS", "Workload", "batches"]

BATCHES = 4  # different inputs of a rank, used in turn
CLASSES = 10

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]  # (samples, inputs), (samples,)


@dataclass(frozen=True)
class Workload:
    """A model and the input of one rank's step. ``samples`` is a rank's batch size."""

    name: str
    samples: int
    inputs: int
    layers: Callable[[], list[Any]]

    def make(self) -> Any:
        """Return a model with the same initial weights in every process."""
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((self.inputs,)), *self.layers(), keras.layers.Dense(CLASSES)])


def _wide() -> list[Any]:
    return [keras.layers.Dense(units, activation="relu") for units in (4096, 4096, 1024)]


def _deep() -> list[Any]:
    """Return 200 layers, with Kaiming initialization.

    With Keras's own, gradients would become denormal numbers, which are slow.
    """
    return [keras.layers.Dense(64, activation="relu", kernel_initializer="he_normal") for _ in range(200)]


def batches(workload: Workload, rank: int) -> list[Batch]:
    """Return the batches of ``rank``, the same in all processes that train for it."""
    own = np.random.default_rng(1 + rank)
    shape = (workload.samples, workload.inputs)
    return [
        (own.standard_normal(shape, np.float32), own.integers(CLASSES, size=workload.samples)) for _ in range(BATCHES)
    ]


WORKLOADS = {workload.name: workload for workload in (Workload("wide", 8, 3072, _wide), Workload("deep", 8, 64, _deep))}
