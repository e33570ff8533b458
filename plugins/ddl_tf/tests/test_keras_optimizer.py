"""Where a distributed Keras optimizer reduces: before clipping and before a loss scaler looks; with weights if asked."""

from __future__ import annotations

import pickle
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras as ddl_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras.seams import step_of

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(120)

KERAS = pytest.mark.parametrize("family", ["keras3", "tf_keras", "older"])


def module_of(family: str) -> Any:
    """Return the module that has the family's optimizers."""
    if family == "keras3":
        return keras.optimizers
    legacy = pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
    return legacy.optimizers if family == "tf_keras" else legacy.optimizers.legacy


def scaler_of(family: str) -> Any:
    """Return the class of the family's loss scaler."""
    if family == "keras3":
        return keras.optimizers.LossScaleOptimizer
    legacy = pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
    return legacy.mixed_precision.LossScaleOptimizer


def applied(optimizer: Any, gradient: Any) -> float:
    """Return by how much the optimizer lowers a variable with this gradient."""
    variable = tf.Variable([10.0])
    optimizer.apply_gradients([(tf.constant([gradient]), variable)])
    return 10.0 - float(variable[0])


@KERAS
@pytest.mark.parametrize("limit", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_the_average_is_clipped(limit: str, family: str) -> None:
    """Clipping comes after the reduction: the average of 0 and 4 is clipped to 1. Clipped before, it would be 0.5."""

    def play(rank: int, job: Any) -> float:
        optimizer = module_of(family).SGD(1.0, **{limit: 1.0})
        return applied(ddl_keras.DistributedOptimizer(optimizer), 4.0 * rank)

    assert run_world(2, play) == pytest.approx([1.0, 1.0])


@KERAS
def test_ranks_count_by_their_weights(family: str) -> None:
    """The weight is a variable, a function or a share: (3 * 0 + 5 * 8) / 8 = 5."""

    def play(rank: int, job: Any) -> list[float]:
        rows = 5.0 if rank else 3.0
        given = [tf.Variable(rows), lambda: rows, ddl.Share(int(rows), 8, 2)]
        optimizers = [ddl_keras.DistributedOptimizer(module_of(family).SGD(1.0), weight=weight) for weight in given]
        with pytest.raises(ValueError, match="needs backward_passes_per_step=1"):
            ddl_keras.DistributedOptimizer(module_of(family).SGD(1.0), weight=1, backward_passes_per_step=2)
        return [applied(optimizer, 8.0 * rank) for optimizer in optimizers]

    assert run_world(2, play) == [[5.0, 5.0, 5.0]] * 2


@KERAS
@pytest.mark.parametrize("inside", [False, True], ids=["ours outside", "ours inside"])
def test_all_ranks_skip_a_step_that_overflows_or_none(inside: bool, family: str) -> None:
    """If the gradient of one rank is infinite, a loss scaler skips the step on both, and both make the next one."""

    def play(rank: int, job: Any) -> list[float]:
        plain, scaled, distributed = module_of(family).SGD(1.0), scaler_of(family), ddl_keras.DistributedOptimizer
        optimizer = scaled(distributed(plain)) if inside else distributed(scaled(plain))
        variable = tf.Variable([10.0])
        if family == "keras3":
            optimizer.build([variable])

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def step(value: Any) -> None:
            optimizer.apply_gradients([(value, variable)])

        values = []
        for value in (float("inf") if rank else 1.0, 1.0 + 2.0 * rank):
            step(tf.constant([value]))
            values.append(float(variable[0]))
        return values

    first, second = run_world(2, play)
    assert first == second
    assert first[0] == 10.0 and first[1] < 10.0


def test_mixed_precision_scales_the_loss_around_ours() -> None:
    """With the policy mixed_float16, Keras puts a loss scaler around the optimizer, which still steps by the average."""

    def play(rank: int, job: Any) -> float:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
        model.compile(optimizer=ddl_keras.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss="mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert step_of(model.optimizer) is not None
        model.optimizer.build(model.trainable_variables)
        scale = model.optimizer.scale_loss(tf.constant(1.0))
        model.optimizer.apply([tf.fill((1, 1), 4.0 * rank) * scale])
        return float(layer.kernel.numpy()[0, 0])

    assert run_world(2, play) == [-1.0, -1.0]


def test_what_is_saved_is_the_plain_optimizer() -> None:
    """The configuration is that of an optimizer which is not distributed, and a copy is none that is."""

    def play(rank: int, job: Any) -> None:
        wrapped = ddl_keras.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5, name="SGD"))
        plain = keras.optimizers.serialize(keras.optimizers.SGD(0.5, momentum=0.5, name="SGD"))
        assert keras.optimizers.serialize(wrapped) == plain
        copied = pickle.loads(pickle.dumps(wrapped))
        assert step_of(wrapped) is not None and step_of(copied) is None
        assert applied(copied, 4.0 * rank) == 2.0 * rank
        ddl_keras.DistributedOptimizer(copied)  # raises if the copy is distributed already

    run_world(2, play)


def test_a_file_goes_on_with_a_distributed_optimizer(tmp_path: Any) -> None:
    """A .keras file has the state of the plain optimizer, and ``load_model`` makes the optimizer distributed again."""

    class Slow(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
        """An optimizer class of the user's own."""

    def play(rank: int, job: Any) -> None:
        for cls, known in ((keras.optimizers.SGD, None), (Slow, [Slow])):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(optimizer=ddl_keras.DistributedOptimizer(cls(0.5, momentum=0.5)), loss="mse")
            kernel = model.layers[0].kernel
            model.optimizer.build(model.trainable_variables)
            bias = tf.zeros(1)
            model.optimizer.apply([tf.constant([[4.0 * rank]]), bias])  # the velocity is -1
            assert float(kernel.numpy()[0, 0]) == 0.0
            path = tmp_path / f"{cls.__name__}.{rank}.keras"
            model.save(path)
            plain = keras.models.load_model(path, custom_objects={"Slow": Slow})
            assert type(plain.optimizer) is cls and step_of(plain.optimizer) is None
            loaded = ddl_keras.load_model(path, custom_optimizers=known)
            assert type(loaded.optimizer) is cls
            loaded.optimizer.apply([tf.constant([[8.0 * rank]]), bias])
            np.testing.assert_array_equal(loaded.layers[0].kernel.numpy(), [[-0.5 - 2.0]])
            with pytest.raises(ValueError, match="already"):
                ddl_keras.DistributedOptimizer(loaded.optimizer)

    run_world(2, play)
