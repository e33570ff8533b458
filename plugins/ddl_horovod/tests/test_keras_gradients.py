"""Optimizers of tf_keras whose compute_gradients reduces, as Horovod's does, in worlds of threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.keras import PartialDistributedOptimizer

from ddlcore.errors import InvalidArgument, PeerLost
from ddlcore.testing import run_world

tf_keras = pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
pytestmark = pytest.mark.timeout(120)

OPTIMIZERS = {"newer": tf_keras.optimizers, "older": tf_keras.optimizers.legacy}
FAMILIES = pytest.mark.parametrize("family", sorted(OPTIMIZERS))
TRACED = pytest.mark.parametrize("traced", [False, True], ids=["eagerly", "in a function"])


def in_function(traced: bool, step: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``step``, or a tf.function of it, which returns nothing."""

    def run() -> None:
        step()

    return tf.function(run) if traced else run


@TRACED
@FAMILIES
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_computed_gradients_are_reduced_once(op: int, family: str, traced: bool) -> None:
    """The gradients 0 and 4 make 2 or 4, by both names of the method. A script that clips them clips the result."""

    def play(rank: int, job: Any) -> list[float]:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0), op=op)
        variable = tf.Variable([10.0])
        seen = tf.Variable([0.0])

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = 4.0 * rank * variable
            ((gradient, one),) = optimizer.compute_gradients(loss, [variable], tape)
            seen.assign(gradient)
            optimizer.apply_gradients([(tf.minimum(gradient, 3.0), one)])
            ((gradient, _),) = optimizer._compute_gradients(lambda: 4.0 * rank * variable, [variable])
            optimizer.apply_gradients([(gradient, variable)])

        run = in_function(traced, step)
        run()
        run()
        return [float(seen[0]), float(variable[0])]

    reduced = 2.0 if op == hvd.Average else 4.0
    assert run_world(2, play) == [[reduced, 10.0 - 2 * (min(reduced, 3.0) + reduced)]] * 2


@TRACED
@FAMILIES
@pytest.mark.parametrize("averages", [False, True])
def test_passes_are_added_up_and_counted(averages: bool, family: str, traced: bool) -> None:
    """Each pass is a step of the optimizer; every third one is applied. A local variable steps on its own gradients."""

    def play(rank: int, job: Any) -> list[list[float]]:
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[family].SGD(1.0), backward_passes_per_step=3, average_aggregated_gradients=averages
        )
        shared, local, unused = tf.Variable([0.0]), tf.Variable([0.0, 0.0]), tf.Variable([0.0])
        optimizer.register_local_var(local)
        if family == "older":
            _ = optimizer.iterations

        def loss() -> Any:
            return (rank + 1.0) * (shared + tf.gather(local, [1]))

        run = in_function(traced, lambda: optimizer.minimize(loss, [shared, local, unused]))
        seen = []
        for _ in range(7):
            run()
            seen.append([float(shared[0]), float(local[0]), float(local[1]), float(optimizer.iterations)])
        assert int(optimizer._agg_helper.counter) == 1
        return seen

    for rank, seen in enumerate(run_world(2, play)):
        size = 1.0 if averages else 3.0
        expected = [
            [-1.5 * size * (passes // 3), 0.0, -(rank + 1.0) / 2 * size * (passes // 3), passes]
            for passes in range(1, 8)
        ]
        np.testing.assert_allclose(seen, expected)


@FAMILIES
def test_gradients_that_could_not_be_reduced_do_not_count(family: str) -> None:
    """If the reduction fails, the next gradients that the script applies are reduced as usual."""

    def play(rank: int, job: Any) -> float:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0))
        variable = tf.Variable([0.0])
        step = vars(optimizer)["_ddl"]
        reduce = step.reduce

        def fail(*_: Any) -> Any:
            raise PeerLost((1,), "it has ended")

        step.reduce = fail
        with pytest.raises(PeerLost):
            optimizer.compute_gradients(lambda: (rank + 1.0) * variable, [variable])
        step.reduce = reduce
        optimizer.apply_gradients([(tf.constant([rank + 1.0]), variable)])
        return float(variable[0])

    assert run_world(2, play) == [-1.5, -1.5]


@FAMILIES
def test_an_infinite_pass_does_not_reach_the_next_step(family: str) -> None:
    """The sums begin at zero again, whatever the passes before were."""

    def play(rank: int, job: Any) -> list[float]:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0), backward_passes_per_step=2)
        variable = tf.Variable([0.0])
        seen = []
        for factor in (float("inf"), 1.0, 1.0, 1.0):
            ((gradient, _),) = optimizer.compute_gradients(lambda by=factor: by * variable, [variable])
            seen.append(float(gradient[0]))
        return seen

    assert run_world(2, play) == [[float("inf"), float("inf"), 1.0, 2.0]] * 2


@FAMILIES
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_from_elsewhere_are_reduced_as_before(passes: int, family: str) -> None:
    """A loop with a tape of TensorFlow gives apply_gradients its own gradients, which are reduced there, once."""

    def play(rank: int, job: Any) -> float:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0), backward_passes_per_step=passes)
        variable = tf.Variable([10.0])
        for _ in range(passes):
            optimizer.apply_gradients([(tf.constant([4.0 * rank]), variable)])
        return float(variable[0])

    assert run_world(2, play) == [10.0 - 2.0 * passes] * 2


@TRACED
@FAMILIES
@pytest.mark.parametrize("passes", [1, 2])
def test_loops_of_both_kinds_take_turns(passes: int, family: str, traced: bool) -> None:
    """After ``minimize`` in a function, as in fit, a loop with a tape is reduced as before, once, and the reverse."""

    def play(rank: int, job: Any) -> list[float]:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        variable = tf.Variable([0.0])
        if family == "older":
            _ = optimizer.iterations
        fits = in_function(True, lambda: optimizer.minimize(lambda: (rank + 1.0) * variable, [variable]))
        taped = in_function(traced, lambda: optimizer.apply_gradients([(tf.constant([10.0 * (rank + 1.0)]), variable)]))
        seen = []
        for run in (fits, taped, fits, taped):
            for _ in range(passes):
                run()
            seen.append(float(variable[0]))
        return seen

    assert run_world(2, play) == [[-3.0 * passes, -33.0 * passes, -36.0 * passes, -66.0 * passes]] * 2


@FAMILIES
def test_gradients_may_be_computed_and_applied_in_different_places(family: str) -> None:
    """They are reduced once, if a function computes them and eager code applies them, and if it is the other way round."""

    def play(rank: int, job: Any) -> list[float]:
        values = []
        for traced in (True, False):
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0), op=hvd.Sum)
            variable = tf.Variable([0.0])
            if family == "older":
                _ = optimizer.iterations

            def compute(optimizer: Any = optimizer, variable: Any = variable) -> Any:
                return optimizer.compute_gradients(lambda: (rank + 1.0) * variable, [variable])[0][0]

            def apply(gradient: Any, optimizer: Any = optimizer, variable: Any = variable) -> None:
                optimizer.apply_gradients([(gradient, variable)])

            computed, applied = (tf.function(compute), apply) if traced else (compute, tf.function(apply))
            for _ in range(3):
                applied(computed())
            values.append(float(variable[0]))
        return values

    assert run_world(2, play) == [[-9.0, -9.0]] * 2


@FAMILIES
def test_gradients_of_both_kinds_in_one_call_are_an_error(family: str) -> None:
    """Nothing is applied. Gradients that were computed wait, and others may be applied after them."""

    def play(rank: int, job: Any) -> float:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[family].SGD(1.0))
        one, other = tf.Variable([0.0]), tf.Variable([0.0])
        if family == "newer":
            optimizer.build([one, other])  # it takes no others later
        pairs = optimizer.compute_gradients(lambda: 4.0 * rank * one, [one])
        own = (tf.constant([1.0 + rank]), other)
        with pytest.raises(
            InvalidArgument, match=r"1 variables that compute_gradients\(\) has reduced, and of 1 others"
        ):
            optimizer.apply_gradients([*pairs, own])
        optimizer.apply_gradients(pairs)
        optimizer.apply_gradients([own])
        return float(one[0] + other[0])

    assert run_world(2, play) == [-3.5] * 2


def test_sums_belong_to_variables() -> None:
    """The variables may differ between passes, and a variable may have no gradient in a pass. The sums do not mix."""

    def play(rank: int, job: Any) -> list[list[float]]:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["newer"].SGD(1.0), backward_passes_per_step=2)
        first, second = tf.Variable([0.0]), tf.Variable([0.0, 0.0])
        optimizer.build([first, second])
        seen = []
        for uses in ([first], [second, first], [second], [second, first]):
            pairs = optimizer.compute_gradients(lambda uses=uses: sum(tf.reduce_sum(one) for one in uses), uses)
            optimizer.apply_gradients(pairs)
            seen.append([float(first[0]), float(second[0])])
        return seen

    assert run_world(2, play) == [[[0.0, 0.0], [-2.0, -1.0], [-2.0, -1.0], [-3.0, -3.0]]] * 2


@FAMILIES
@pytest.mark.parametrize("inside", [False, True], ids=["ours outside", "ours inside"])
def test_a_loss_scaler_computes_reduced_gradients(inside: bool, family: str) -> None:
    """An infinite gradient of one rank makes both skip a step; the next one is by the average, reduced once."""

    def play(rank: int, job: Any) -> list[float]:
        plain, scaler = OPTIMIZERS[family].SGD(1.0), tf_keras.mixed_precision.LossScaleOptimizer
        given = {"dynamic": True, "initial_scale": 2.0}
        ours = hvd.DistributedOptimizer
        optimizer = scaler(ours(plain, op=hvd.Sum), **given) if inside else ours(scaler(plain, **given), op=hvd.Sum)
        variable, factor = tf.Variable([10.0]), tf.Variable(1.0)
        step = in_function(True, lambda: optimizer.minimize(lambda: factor * variable, [variable]))
        values = []
        for value in (float("inf") if rank else 1.0, 1.0 + 2.0 * rank):
            factor.assign(value)
            step()
            values.append(float(variable[0]))
        return values

    assert run_world(2, play) == [[10.0, 6.0]] * 2


def test_layers_of_a_partial_optimizer_stay_local() -> None:
    """Their gradients are only scaled."""

    def play(rank: int, job: Any) -> list[Any]:
        layers = [tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        model = tf_keras.Sequential([tf_keras.Input((1,)), *layers])
        optimizer = PartialDistributedOptimizer(tf_keras.optimizers.SGD(1.0), local_layers=layers[:1])
        with tf.GradientTape() as tape:
            loss = model(tf.constant([[rank + 1.0]]))
        return [
            float(gradient[0, 0]) for gradient, _ in optimizer.compute_gradients(loss, model.trainable_weights, tape)
        ]

    assert run_world(2, play) == [[0.5, 1.5], [1.0, 1.5]]


def test_a_copy_computes_its_own_gradients() -> None:
    """A copy of the optimizer is not distributed, by either name of the method. The newer ones cannot be copied."""

    def play(rank: int, job: Any) -> list[float]:
        twin = copy.deepcopy(hvd.DistributedOptimizer(OPTIMIZERS["older"].SGD(1.0), backward_passes_per_step=2))
        variable = tf.Variable([0.0])
        gradients = [
            compute(lambda: (rank + 1.0) * variable, [variable])[0][0]
            for compute in (twin.compute_gradients, twin._compute_gradients)
        ]
        twin.apply_gradients([(gradients[0], variable)])
        return [float(gradients[0][0]), float(gradients[1][0]), float(variable[0])]

    assert run_world(2, play) == [[1.0, 1.0, -1.0], [2.0, 2.0, -2.0]]


def test_keras_3_has_no_such_method() -> None:
    """Optimizers of Keras 3 reduce gradients in ``apply``, as they do with ddl_tf."""

    def play(rank: int, job: Any) -> float:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        assert not hasattr(optimizer, "compute_gradients") and optimizer._agg_helper is None
        variable = tf.Variable([0.0])
        for _ in range(2):
            optimizer.apply_gradients([(tf.constant([rank + 1.0]), variable)])
        return float(variable[0])

    assert run_world(2, play) == [-3.0, -3.0]


def test_a_loaded_model_has_such_an_optimizer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_model makes the optimizer distributed as DistributedOptimizer does."""
    monkeypatch.setattr("ddl_tf.keras.loading.the_keras", lambda: tf_keras)
    model = tf_keras.Sequential([tf_keras.Input((1,)), tf_keras.layers.Dense(1)])
    model.compile(optimizer=tf_keras.optimizers.SGD(1.0), loss="mse")
    model.save(tmp_path / "model.keras")

    def play(rank: int, job: Any) -> float:
        loaded = hvd.load_model(tmp_path / "model.keras")
        variable = tf.Variable([0.0])
        ((gradient, _),) = loaded.optimizer.compute_gradients(lambda: (rank + 1.0) * variable, [variable])
        return float(gradient[0])

    assert run_world(2, play) == [1.5, 1.5]
