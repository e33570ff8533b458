"""Keras optimizers whose classes override methods step on reduced gradients, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddl_tf.keras as ddl_keras
import keras
import pytest
import tensorflow as tf

from ddlcore.errors import InvalidArgument
from ddlcore.testing import run_world
from plugins.ddl_tf.tests.test_keras_optimizer import KERAS, module_of, scaler_of

pytestmark = pytest.mark.timeout(120)


def descend(grads_and_vars: Any) -> None:
    for gradient, variable in grads_and_vars:
        variable.assign_sub(gradient)


def overriding(family: str, method: str) -> Any:
    """Return an SGD whose class overrides ``method``."""
    SGD = module_of(family).SGD

    def bypass(self: Any, pairs: Any) -> Any:
        if family == "keras3":
            return SGD.apply(self, [gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        no = (
            {"skip_gradients_aggregation": True}
            if family == "tf_keras"
            else {"experimental_aggregate_gradients": False}
        )
        return SGD.apply_gradients(self, pairs, **no)

    methods: dict[str, dict[str, Callable[..., Any]]] = {
        "apply_gradients": {"apply_gradients": lambda self, pairs, **_: descend(pairs)},
        "apply_gradients of Keras": {"apply_gradients": lambda self, pairs, **_: SGD.apply_gradients(self, pairs)},
        "apply_gradients past ours": {"apply_gradients": lambda self, pairs, **_: bypass(self, list(pairs))},
        "apply": {"apply": lambda self, gradients, variables=None: descend(zip(gradients, variables))},
        "one variable": {
            "update_step": lambda self, gradient, variable, rate=None: descend([(gradient, variable)]),
            "_resource_apply_dense": lambda self, gradient, variable, **_: variable.assign_sub(gradient),
        },
        "aggregation": {
            name: lambda self, pairs: [(gradient * 1.0, variable) for gradient, variable in pairs]
            for name in ("aggregate_gradients", "_aggregate_gradients")
        },
    }
    if method == "apply" and family == "tf_keras":
        return SGD(1.0)  # it has a method of that name, which is internal and gets other arguments
    return type("Own", (SGD,), {**methods[method], "__module__": __name__})(1.0)


METHODS = pytest.mark.parametrize(
    "method",
    [
        "apply_gradients",
        "apply_gradients of Keras",
        "apply_gradients past ours",
        "apply",
        "one variable",
        "aggregation",
    ],
)


@KERAS
@METHODS
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "function"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_summed_once(family: str, method: str, eager: bool, passes: int) -> None:
    """The sum of 1 and 4 is 5; unreduced steps would be 1 and 4, and a second reduction would give 10."""

    def play(rank: int, job: Any) -> list[float]:
        optimizer = ddl_keras.DistributedOptimizer(
            overriding(family, method), op=ddl_keras.Sum, backward_passes_per_step=passes
        )
        variable = tf.Variable([10.0])
        if family == "keras3":
            optimizer.build([variable])

        def step(gradient: Any) -> None:
            optimizer.apply_gradients([(gradient, variable)])

        call = step if eager else tf.function(step)
        steps = []
        for _ in range(2 * passes):
            call(tf.constant([1.0 + 3.0 * rank]))
            steps.append(10.0 - float(variable[0]))
        return steps

    expected = [5.0, 10.0] if passes == 1 else [0.0, 10.0, 10.0, 20.0]
    assert run_world(2, play) == [expected] * 2


@KERAS
@pytest.mark.parametrize("inside", [False, True], ids=["ours outside", "ours inside"])
def test_a_loss_scaler_around_an_override(family: str, inside: bool) -> None:
    """The scaler aggregates before it looks for overflow; the override must not reduce again."""

    def play(rank: int, job: Any) -> float:
        own, distributed = overriding(family, "apply_gradients"), ddl_keras.DistributedOptimizer
        scaled = scaler_of(family)
        options: dict[str, Any] = (
            {"initial_scale": 1.0} if family == "keras3" else {"dynamic": False, "initial_scale": 1}
        )
        optimizer = (
            scaled(distributed(own, op=ddl_keras.Sum), **options)
            if inside
            else distributed(scaled(own, **options), op=ddl_keras.Sum)
        )
        variable = tf.Variable([10.0])
        optimizer.apply_gradients([(tf.constant([1.0 + 3.0 * rank]), variable)])
        return 10.0 - float(variable[0])

    assert run_world(2, play) == [5.0, 5.0]


@pytest.mark.parametrize("family", ["tf_keras", "older"])
def test_own_aggregation_gets_the_reduced_gradients(family: str) -> None:
    """What a class does in its own aggregation is not left out."""

    def play(rank: int, job: Any) -> float:
        names = ("aggregate_gradients", "_aggregate_gradients")

        def tenfold(self: Any, pairs: Any) -> Any:
            return [(10.0 * gradient, variable) for gradient, variable in pairs]

        SGD = module_of(family).SGD
        own = type("Own", (SGD,), {**dict.fromkeys(names, tenfold), "__module__": __name__})
        variable = tf.Variable([100.0])
        ddl_keras.DistributedOptimizer(own(1.0)).apply_gradients([(tf.constant([4.0 * rank]), variable)])
        return 100.0 - float(variable[0])

    assert run_world(2, play) == [20.0, 20.0]


@KERAS
def test_single_updates_from_outside_are_refused(family: str) -> None:
    """An optimizer around ours that calls a method for one variable passes by the reduction."""

    def play(rank: int, job: Any) -> str:
        inner = ddl_keras.DistributedOptimizer(module_of(family).SGD(1.0))
        variable = tf.Variable([10.0])
        inner.apply_gradients([(tf.constant([1.0]), variable)])
        update = inner._resource_apply_dense if family == "older" else inner.update_step
        with pytest.raises(InvalidArgument) as info:
            update(tf.constant([1.0]), variable, *([1.0] if family == "keras3" else []))
        assert float(variable[0]) == 9.0
        return str(info.value)

    assert all("is not reduced" in message for message in run_world(2, play))


@pytest.mark.parametrize("family", ["tf_keras", "older"])
@pytest.mark.parametrize("fit", [False, True])
def test_a_minimize_of_its_own_is_checked(family: str, fit: bool) -> None:
    """One that updates variables itself is refused; one that calls ``apply_gradients`` works."""

    def play(rank: int, job: Any) -> float:
        SGD = module_of(family).SGD
        how = {"minimize": lambda self, loss, variables, tape: descend(zip(tape.gradient(loss, variables), variables))}
        if fit:
            how["minimize"] = lambda self, loss, variables, tape: self.apply_gradients(
                zip(tape.gradient(loss, variables), variables)
            )
        optimizer = ddl_keras.DistributedOptimizer(type("Own", (SGD,), {**how, "__module__": __name__})(1.0))
        variable = tf.Variable([10.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 4.0 * rank)
        if fit:
            optimizer.minimize(loss, [variable], tape)
        else:
            with pytest.raises(InvalidArgument, match="has not called apply_gradients"):
                optimizer.minimize(loss, [variable], tape)
            return 2.0
        return 10.0 - float(variable[0])

    assert run_world(2, play) == [2.0, 2.0]


def test_fit_with_an_override() -> None:
    """``fit`` gives the same weights on all ranks, which saw different data."""

    def play(rank: int, job: Any) -> float:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        optimizer = ddl_keras.DistributedOptimizer(overriding("keras3", "apply_gradients"))
        model.compile(optimizer=optimizer, loss="mae")
        model.fit(tf.fill([2, 1], 1.0 + 2.0 * rank), tf.zeros([2, 1]), epochs=1, verbose=0)
        return float(model.get_weights()[0][0, 0])

    assert run_world(2, play) == [-1.0, -1.0]
