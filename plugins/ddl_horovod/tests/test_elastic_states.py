"""The elastic states of horovod's packages go back to the last commit, unless a script asks for another rollback."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from horovod.torch.elastic import TorchState

from ddlcore.testing import run_world

KERAS_STATES = (
    "horovod.keras.elastic.KerasState",
    "horovod.keras.elastic.TensorFlowKerasState",
    "horovod.tensorflow.elastic.TensorFlowKerasState",
    "horovod.tensorflow.keras.elastic.KerasState",
    "horovod.tensorflow.keras.elastic.TensorFlowKerasState",
)


def play(state: Any, read: Callable[[], Any], write: Callable[[float], None]) -> list[float]:
    """Change a weight and a counter, restore, change, commit, change and restore; return both after each restore."""
    state.sync()
    seen: list[float] = []
    for commits in (False, True):
        write(2.0)
        state.batch = 21
        if commits:
            state.commit()
            write(3.0)
            state.batch = 22
        state.restore()
        seen += [float(read()), state.batch]
    return seen


def of_torch(rank: int, **options: Any) -> list[float]:
    """Play with a TorchState."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0 + 4 * rank)
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model, optimizer, batch=20 + rank, **options)
    return play(state, model.weight.item, lambda value: model.load_state_dict({"weight": torch.tensor([[value]])}))


def of_keras(cls: Any, rank: int, **options: Any) -> list[float]:
    """Play with a state of Keras."""
    start = keras.initializers.Constant(1.0 + 4 * rank)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)])
    state = cls(model, keras.optimizers.Adam(), batch=20 + rank, **options)
    return play(state, lambda: model.get_weights()[0][0, 0], lambda value: model.set_weights([np.array([[value]])]))


def test_of_torch() -> None:
    """The weights and the counter are those of the last commit, or of rank 0 at the beginning."""
    assert run_world(2, lambda rank, job: of_torch(rank)) == [[1.0, 20, 2.0, 21]] * 2


@pytest.mark.parametrize("name", KERAS_STATES)
def test_of_keras(name: str) -> None:
    """Each class for Keras goes back in the same way."""
    module, _, name = name.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert run_world(2, lambda rank, job: of_keras(cls, rank)) == [[1.0, 20, 2.0, 21]] * 2


def test_a_script_may_ask_for_steps() -> None:
    """With rollback="step" the weights stay as they are, because steps are never taken back."""
    module = importlib.import_module("horovod.keras.elastic")
    assert run_world(2, lambda rank, job: of_torch(rank, rollback="step")) == [[2.0, 20, 3.0, 21]] * 2
    assert (
        run_world(2, lambda rank, job: of_keras(module.KerasState, rank, rollback="step")) == [[2.0, 20, 3.0, 21]] * 2
    )


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "within a loss scaler"])
def test_ranks_that_join_have_no_passes(scales: bool) -> None:
    """When the ranks of a new world agree on the state, all begin to add up gradients again."""
    tf_keras = pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
    module = importlib.import_module("horovod.tensorflow.keras")

    def program(rank: int, job: Any) -> list[int]:
        model = tf_keras.Sequential([tf_keras.Input((1,)), tf_keras.layers.Dense(1)])
        optimizer = module.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        scaler = tf_keras.mixed_precision.LossScaleOptimizer
        state = module.elastic.KerasState(model, scaler(optimizer) if scales else optimizer)
        seen = []
        for _ in range(2):
            optimizer.compute_gradients(lambda: model.weights[0][0, 0], model.trainable_variables)
            seen.append(int(optimizer._agg_helper.counter))
            state.sync()
        return seen

    assert run_world(2, program) == [[1, 1]] * 2
