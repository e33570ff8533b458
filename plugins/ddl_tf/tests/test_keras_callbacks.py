"""Keras callbacks on two ranks, called as ``fit`` would call them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras import DistributedOptimizer, callbacks

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(120)


def model_of(rank: int, built: bool = True) -> Any:
    """Return a compiled model with other weights on each rank, and with momentum."""
    layers = [keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(rank + 1.0)) for _ in range(2)]
    model = keras.Sequential(layers)
    if built:
        model.build((None, 3))
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)), loss="mse")
    return model


def step(model: Any, value: float) -> None:
    """Train on one batch, eagerly. This builds the model."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.fill((1, 3), value)))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def set_velocities(model: Any, value: float) -> None:
    """Give the optimizer a state that gradients of all ranks together would not give it."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for velocity in model.optimizer.momentums:
        velocity.assign(tf.fill(velocity.shape, value))


def values_of(model: Any) -> list[Any]:
    return [np.array(one) for one in (*model.weights, *model.optimizer.variables)]


@pytest.mark.parametrize("late", [False, True], ids=["built before", "built in the first step"])
def test_ranks_begin_with_the_variables_of_root(late: bool) -> None:
    """Model and optimizer are those of root after the first step, although one rank builds its model in that step.

    Nothing is broadcast after that.
    """

    def play(rank: int, job: Any) -> tuple[list[Any], list[Any]]:
        model = model_of(rank, built=not late or rank == 0)
        if not late:
            set_velocities(model, rank + 1.0)
        begin = callbacks.BroadcastGlobalVariablesCallback(0)
        begin.set_model(model)
        begin.on_train_begin()
        assert begin.broadcast_done is not late
        step(model, rank + 1.0)
        if late:
            set_velocities(model, rank + 1.0)
        before = values_of(model)
        begin.on_train_batch_end(0)
        assert begin.broadcast_done
        after = values_of(model)
        model.layers[0].bias.assign([7.0 + rank, 7.0])
        begin.on_train_batch_end(1)
        assert model.layers[0].bias.numpy().tolist() == [7.0 + rank, 7.0]
        return before, after

    (roots, first), (_, second) = run_world(2, play)
    assert len(roots) > 4
    for root, one, other in zip(roots, first, second, strict=True):
        np.testing.assert_array_equal(root, one)
        np.testing.assert_array_equal(root, other)


def test_a_local_variable_keeps_its_value() -> None:
    """A variable that is local is not broadcast, whether it is Keras' variable or the one of TensorFlow in it."""

    def play(rank: int, job: Any) -> list[float]:
        found = []
        for bare in (False, True):
            model = model_of(rank)
            kernel = model.layers[1].kernel
            begin = callbacks.BroadcastGlobalVariablesCallback(0, "", kernel.value if bare else kernel)
            begin.set_model(model)
            begin.on_train_begin()
            found += [float(layer.kernel.numpy()[0, 0]) for layer in model.layers]
        return found

    assert run_world(2, play) == [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0]]


def test_metrics_are_averaged_in_place() -> None:
    """Numbers stay numbers, and arrays stay arrays. A metric that only one rank has is an error on both ranks."""

    def play(rank: int, job: Any) -> dict[str, Any]:
        average = callbacks.MetricAverageCallback()
        with pytest.raises(ValueError, match="MetricAverageCallback"):
            average.on_epoch_end(0, {"loss": 1.0, f"only{rank}": 2.0})
        logs: dict[str, Any] = {"loss": np.float32(1 + rank), "by_class": np.array([1.0, 2.0]) * rank}
        average.on_epoch_end(0, logs)
        return logs

    for logs in run_world(2, play):
        assert logs["loss"] == 1.5 and type(logs["loss"]) is float
        np.testing.assert_array_equal(logs["by_class"], [0.5, 1.0])


def rates(callback: Any, first: float, epochs: int, optimizer: Any = None) -> list[float]:
    """Return the learning rate in each batch of epochs with 5 batches, which begins as ``first``."""
    optimizer = optimizer or keras.optimizers.SGD(first)
    callback.set_model(SimpleNamespace(optimizer=optimizer, trainable_variables=[]))
    callback.set_params({"steps": 5})
    callback.on_train_begin()
    found = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(5):
            callback.on_train_batch_begin(batch)
            found.append(float(np.asarray(optimizer.learning_rate)))
        logs: dict[str, Any] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == found[-1]
    return found


def test_learning_rates_follow_a_schedule() -> None:
    """By epochs within limits, by batches, or growing to the rate of all ranks in a warmup."""
    schedule = callbacks.LearningRateScheduleCallback

    def play(rank: int, job: Any) -> None:
        found = rates(schedule(0.1, lambda epoch: 0.5**epoch, start_epoch=1), 0.1, 3)
        np.testing.assert_allclose(found, [0.1] * 5 + [0.05] * 5 + [0.025] * 5, rtol=1e-6)
        found = rates(schedule(0.2, 0.1, end_epoch=1), 0.5, 2)
        np.testing.assert_allclose(found, [0.02] * 10, rtol=1e-6)
        found = rates(schedule(1.0, lambda epoch: 1.0 + epoch, staircase=False), 0.1, 2)
        np.testing.assert_allclose(found, 1.0 + np.arange(10) / 5, rtol=1e-6)
        found = rates(callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2), 0.8, 3)
        np.testing.assert_allclose(found, [0.8 * ((i + 1) / 10 + 1) / 2 for i in range(10)] + [0.8] * 5, rtol=1e-6)
        with pytest.raises(ValueError, match="initial_lr"):
            schedule(cast("float", None), 1.0)
        decaying = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
        with pytest.raises(ValueError, match="is a schedule"):
            rates(schedule(0.2, 0.1), 0.1, 1, decaying)

    run_world(2, play)


@pytest.mark.parametrize("corrected", [True, False])
def test_momentum_is_corrected(corrected: bool) -> None:
    """The velocity grows with the learning rate (Goyal et al. 2017, equation 10), unless that is turned off."""
    variable = tf.Variable([0.0])
    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    optimizer.build([variable])
    callback = callbacks.LearningRateScheduleCallback(
        0.25, lambda epoch: [1.0, 2.0][int(epoch)], momentum_correction=corrected
    )
    callback.set_model(SimpleNamespace(optimizer=optimizer, trainable_variables=[variable]))
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        callback.on_train_batch_begin(0)
        optimizer.apply([tf.constant([1.0])])
    velocity = 0.5 * -0.25 * (2.0 if corrected else 1.0) - 0.5
    assert float(variable[0]) == -0.25 + velocity


def test_momentum_is_corrected_in_a_graph_by_one_operation() -> None:
    """A graph that grows is prepared anew, which takes seconds. So it grows with the first call only."""
    callback = callbacks.LearningRateScheduleCallback(0.25, 2.0)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        velocities = [tf.compat.v1.get_variable(name, (), tf.float64, use_resource=True) for name in "ab"]
        for number, one in enumerate(velocities):
            one.load(number + 1.0, session)
        callback._scale(velocities, 2.0)
        grown = len(graph.get_operations())
        callback._scale(velocities, 1.5)
        assert len(graph.get_operations()) == grown
        assert session.run(velocities) == [3.0, 6.0]
        callback._scale(velocities[:1], 2.0)
        assert session.run(velocities) == [6.0, 6.0]


def test_rank_0_alone_keeps_the_best_model(tmp_path: Path) -> None:
    """A file is written where the metric was never better, by rank 0 only; without a file name the training is refused."""

    def play(rank: int, job: Any) -> list[float]:
        best = callbacks.BestModelCheckpoint(monitor="loss", mode="min", save_weights_only=True)
        model = model_of(0)
        best.set_model(model)
        with pytest.raises(ValueError, match="no file"):
            best.on_train_begin()
        best.filepath = str(tmp_path / f"{rank}.weights.h5")
        best.on_train_begin()
        found = []
        for epoch, loss in enumerate([2.0, 1.0, 3.0]):
            model.layers[0].kernel.assign(tf.fill((3, 2), float(epoch)))
            best.on_epoch_end(epoch, {"loss": loss})
        if rank == 0:
            model.load_weights(best.filepath)
            found.append(float(model.layers[0].kernel.numpy()[0, 0]))
        return found

    assert run_world(2, play) == [[1.0], []]
    assert [path.name for path in tmp_path.iterdir()] == ["0.weights.h5"]
