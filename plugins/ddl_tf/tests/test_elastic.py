"""Elastic states: what they copy, keep and put back, and that a step that fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras import elastic

import ddlcore.api
from ddlcore.errors import DdlInternalError, InvalidArgument
from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(180)
keras: Any = tf.keras


def modules() -> list[Any]:
    """Return the modules of all Keras that are installed: Keras 3, tf_keras."""
    return [tf.keras, pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")]


def small_model(keras: Any = keras) -> Any:
    """Return a built model with averages of batch normalization; its weights are ones and zeros."""
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, kernel_initializer="ones"),
        ]
    )
    assert model.built
    return model


def decaying(keras: Any) -> Any:
    """Return an optimizer that changes variables without their gradients: it counts steps and decays weights."""
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


def values(*owners: Any) -> list[Any]:
    variables = [
        one for owner in owners for one in (owner.variables() if callable(owner.variables) else owner.variables)
    ]
    return [np.array(one) for one in variables]


@pytest.mark.parametrize("tape", [False, True], ids=["optimizer", "tape"])
@pytest.mark.parametrize("which", [0, 1], ids=["keras3", "tf_keras"])
def test_a_failed_step_of_a_graph_changes_nothing(which: int, tape: bool) -> None:
    """Neither the weights, which decay without a gradient, nor the number of steps; and the averages are put back."""
    keras = modules()[which]

    def play(rank: int, job: Any) -> None:
        model, optimizer = small_model(keras), decaying(keras)
        optimizer = optimizer if tape else ddl.DistributedOptimizer(optimizer)
        state = elastic.KerasState(model, optimizer)

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def step(x: Any) -> None:
            with tf.GradientTape() as plain:
                own = ddl.DistributedGradientTape(plain) if tape else plain
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            gradients = own.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        step(tf.ones((4, 3)) * (rank + 1.0))
        assert state.steps == 1
        if rank == 1:
            ddl.shutdown()
            return
        before = values(model, optimizer)
        with pytest.raises((tf.errors.OpError, ddl.DdlInternalError)):
            step(tf.ones((4, 3)) * 5.0)
        assert state.steps == 1
        state.restore()
        for one, other in zip(before, values(model, optimizer), strict=True):
            np.testing.assert_array_equal(one, other)

    run_world(2, play, deadline_s=120.0)


@pytest.mark.parametrize("which", [0, 1], ids=["keras3", "tf_keras"])
def test_all_ranks_take_over_model_optimizer_and_values(which: int) -> None:
    """And the number of steps that they contain, whichever rank is root."""
    keras = modules()[which]

    def play(rank: int, job: Any) -> Any:
        model, optimizer = small_model(keras), decaying(keras)
        state = elastic.KerasState(model, optimizer, epoch=rank, seen=[rank])
        gradients = [tf.ones(one.shape) * (rank + 1.0) for one in model.trainable_variables]
        for _ in range(rank + 1):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        state.enter(1, 0)
        assert (state.steps, state.epoch, state.seen) == (2, 1, [1])
        return values(model, optimizer)

    first, second = run_world(2, play, deadline_s=120.0)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(first[0], values(small_model(keras))[0])


def test_rollback_to_a_commit() -> None:
    """Model, optimizer and values go back to the last commit, and ``steps`` counts commits."""
    model, optimizer = small_model(), decaying(keras)
    state = elastic.KerasState(model, optimizer, rollback="commit", epoch=0)
    gradients = [tf.ones(one.shape) for one in model.trainable_variables]
    ddl.init()
    try:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        state.epoch = 1
        state.commit()
        kept = values(model, optimizer)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        state.epoch = 2
        state.restore()
    finally:
        ddl.shutdown()
    assert (state.steps, state.epoch, int(optimizer.iterations)) == (1, 1, 1)
    for one, other in zip(kept, values(model, optimizer), strict=True):
        np.testing.assert_array_equal(one, other)


def test_passes_of_a_step_begin_again() -> None:
    """With several passes a step, the sums of a step that was left are forgotten, on the ranks that stay, too."""
    ddl.init()
    try:
        model = small_model()
        optimizer = ddl.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        state = elastic.KerasState(model, optimizer)
        before = values(model)
        ones = [tf.ones(one.shape) for one in model.trainable_variables]
        optimizer.apply_gradients(zip(ones, model.trainable_variables))
        assert state.steps == 0
        state.enter(0, 0)
        for _ in range(2):
            optimizer.apply_gradients(zip(ones, model.trainable_variables))
    finally:
        ddl.shutdown()
    assert state.steps == 1
    trainable = [one.trainable for one in model.variables]
    for moved, one, other in zip(trainable, before, values(model), strict=True):
        np.testing.assert_array_equal(one - other, 2.0 * moved * np.ones_like(one))


@pytest.mark.parametrize("session", [False, True], ids=["eager", "session"])
def test_a_tensorflow_state_copies_keeps_and_restores(session: bool) -> None:
    """Its variables take root's values in a new world, and those of the last commit after a failure."""
    play = _in_session if session else _eagerly
    assert run_world(2, play, deadline_s=90.0) == [[2.0, 5.0, 2.0]] * 2


def _eagerly(rank: int, job: Any) -> list[float]:
    variable = tf.Variable(rank + 1.0)
    state = ddl.elastic.TensorFlowState([variable], batch=rank)
    return _states(state, lambda: float(variable), variable.assign)


def _in_session(rank: int, job: Any) -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=rank + 1.0)
        session.run(tf.compat.v1.global_variables_initializer())
        state = ddl.elastic.TensorFlowState(session=session, batch=rank)
        return _states(state, lambda: float(session.run(variable)), lambda value: variable.load(value, session))


def _states(state: Any, read: Callable[[], float], assign: Callable[[float], object]) -> list[float]:
    state.enter(1, 0)
    seen = [read()]
    assert state.batch == 1
    state.batch = 7
    assign(5.0)
    state.commit()
    assign(6.0)
    state.batch = 8
    state.restore()
    assert (state.batch, state.steps) == (7, 1)
    seen.append(read())
    assign(2.0)
    seen.append(read())
    return seen


def test_states_refuse_what_they_cannot_keep() -> None:
    with pytest.raises(InvalidArgument, match="not built"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(InvalidArgument, match="step, commit"):
        elastic.KerasState(small_model(), rollback="never")
    with pytest.raises(InvalidArgument, match="name of the state itself"):
        elastic.KerasState(small_model(), restore=1)
    with pytest.raises(InvalidArgument, match="optimizer of Keras"):
        elastic.KerasState(small_model(), tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(InvalidArgument, match="no variables"):
        ddl.elastic.TensorFlowState()
    with pytest.raises(InvalidArgument, match="session"), tf.Graph().as_default():
        ddl.elastic.TensorFlowState([tf.compat.v1.get_variable("v", ())])
    with pytest.raises(ValueError, match="1 or more"):
        elastic.CommitStateCallback(elastic.KerasState(small_model()), 0)


class _Seen(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Notes what a failure at the end of each batch would go back to."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.places: list[tuple[int, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.places.append((self.state._saved["epoch"], self.state._saved["batch"]))


@pytest.mark.parametrize("commit_first", [True, False], ids=["commit first", "commit last"])
@pytest.mark.parametrize("rollback", ["step", "commit"])
def test_callbacks_say_where_the_training_is(rollback: str, commit_first: bool) -> None:
    """Batches that are done, in whichever order the callbacks stand; with "step", also between two commits."""
    ddl.init()
    try:
        model = small_model()
        model.compile(optimizer=ddl.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        state = elastic.KerasState(model, rollback=rollback, epoch=3, batch=1)
        commit = elastic.CommitStateCallback(state, batches_per_commit=2)
        updates = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)]
        seen = _Seen(state)
        callbacks = [commit, *updates, seen] if commit_first else [*updates, commit, seen]
        x, y = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)
        model.fit(x, y, batch_size=4, epochs=1, callbacks=callbacks, verbose=0)  # batches 1 to 3 of epoch 3
        model.fit(x, y, batch_size=4, initial_epoch=4, epochs=6, callbacks=callbacks, verbose=0)
    finally:
        ddl.shutdown()
    if rollback == "step":
        assert seen.places == [(3, 2), (3, 3), (4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2), (6, 0)]
    else:
        assert seen.places == [(3, 1), (3, 3), (3, 3), (4, 0), (4, 2), (4, 2), (5, 1), (5, 1), (6, 0)]
    assert (state.epoch, state.batch, state.steps) == (6, 0, 9 if rollback == "step" else 7)


def test_a_derived_callback_commits_as_it_likes() -> None:
    """Each commit is a call of the method ``commit``."""
    seen: list[int] = []

    class Noting(elastic.CommitStateCallback):
        def commit(self) -> None:
            seen.append(self.state.steps)
            super().commit()

    ddl.init()
    try:
        model = small_model()
        model.compile(optimizer=ddl.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        state = elastic.KerasState(model, rollback="commit")
        x, y = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)
        model.fit(x, y, batch_size=4, callbacks=[Noting(state, batches_per_commit=2)], verbose=0)
    finally:
        ddl.shutdown()
    assert seen == [0, 1] and state.steps == 2


class _Lost(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Interrupts a call of ``fit`` after two batches, as a lost rank does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise DdlInternalError("a rank is lost")


@pytest.mark.parametrize("rollback", ["step", "commit"])
def test_callbacks_of_an_interrupted_fit_count_no_more(rollback: str) -> None:
    """A training function that makes its callbacks anew for each world leaves those of the worlds before behind."""
    ddl.init()
    try:
        model = small_model()
        model.compile(optimizer=ddl.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        state = elastic.KerasState(model, rollback=rollback, epoch=3, batch=1)
        x, y = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)

        def fit(batches: int, *more: Any) -> None:
            updates = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)]
            callbacks = [elastic.CommitStateCallback(state), *updates, *more]
            model.fit(x[: 4 * batches], y[: 4 * batches], batch_size=4, callbacks=callbacks, verbose=0)

        fit(2)  # the rest of epoch 3
        fit(3)
        with pytest.raises(DdlInternalError):
            fit(3, _Lost())
        assert (state.epoch, state.batch) == (5, 2)
        fit(1)
        with pytest.raises(DdlInternalError):
            fit(3, _Lost())
    finally:
        ddl.shutdown()
    assert (state.epoch, state.batch) == (6, 2)
    assert (state._saved["epoch"], state._saved["batch"]) == (6, 2)
    assert len(state.positions) == 2, "the others are forgotten, with what they refer to"


def test_horovods_names_are_there() -> None:
    assert ddl.elastic.TensorFlowKerasState is ddl_tf.keras.elastic.state.TensorFlowKerasState
    assert ddl.elastic.run is ddl_tf.keras.elastic.run is ddlcore.api.elastic.run
    with pytest.raises(AttributeError, match="nothing"):
        _ = ddl.elastic.nothing
