"""Gradients are only read: whatever shares memory with one (a gradient, a variable or a constant) keeps its values."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.exchange import Exchange
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.testing import run_world
from plugins.ddl_tf.tests.worlds import MODES, evaluate

pytestmark = pytest.mark.timeout(120)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "fp16": {"compression": ddl.Compression.fp16},
    "groups": {"groups": 3},
}


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_aliases_are_reduced_once_each(way: str, mode: str) -> None:
    """One tensor may be the gradient of several variables, flat, reshaped and identical, and keeps its values.

    Small gradients, which are joined, and large ones, which are sent from where they are.
    """

    def play(rank: int, job: Any) -> None:
        for rows in (2, 200):
            reducer = Reducer(Reduction(**WAYS[way]), f"{way}.{rows}")

            def build(own: Any, reducer: Reducer = reducer, rows: int = rows) -> Any:
                aliases = [own, own, tf.reshape(own, [-1]), tf.identity(own), tf.reshape(own, [200, rows])]
                means = reducer.reduce(aliases, aliases)
                with tf.control_dependencies(means):
                    return means, tf.identity(own), [tf.identity(one) for one in aliases]

            means, own, aliases = evaluate(mode, build, np.full((rows, 200), rank + 1.0, np.float32), times=3)
            for mean in means:
                np.testing.assert_array_equal(mean, np.full(mean.shape, 1.5))
            for one in (own, *aliases):
                np.testing.assert_array_equal(one, np.full(one.shape, rank + 1.0))

    run_world(2, play, deadline_s=90.0)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_gradient_that_is_a_variable_or_a_constant(graph: bool) -> None:
    """A gradient may share its memory with a variable, a constant or another gradient.

    If the loss is a product, the gradient by one factor is the other factor's memory. If it is a sum, both gradients
    are the same tensor.
    """

    def play(rank: int, job: Any) -> None:
        a, b, c, d = (tf.Variable(tf.fill((300, 100), rank + 1.0)) for _ in range(4))
        constant = tf.fill((300, 100), rank + 1.0)

        def step() -> Any:
            with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
                both = tf.reshape(c, [-1]) + tf.reshape(d, [-1])
                loss = tf.reduce_sum(a * b) + tf.reduce_sum(both * tf.reshape(constant, [-1]))
            return tape.gradient(loss, [a, b, c, d])

        run = tf.function(step) if graph else step
        for _ in range(4):
            for mean in run():
                np.testing.assert_array_equal(mean, np.full((300, 100), 1.5))
        for one in (a, b, c, d, constant):
            np.testing.assert_array_equal(one, np.full((300, 100), rank + 1.0))

    run_world(2, play, deadline_s=90.0)


def test_results_live_as_long_as_something_may_write_them() -> None:
    """The memory of a result is kept while its operation is in flight; afterwards only the user refers to it."""

    def play(rank: int, job: Any) -> None:
        reducer = Reducer(Reduction(), "kept")
        variable = tf.Variable(tf.zeros((300, 100)))
        kept: list[Any] = []
        send = Exchange.send

        def sending(exchange: Exchange, first: int, *tensors: Any) -> Any:
            token = send(exchange, first, *tensors)
            for entry in exchange._entries:
                assert not entry.pending or entry.target.owner is not None
            return token

        reducer.reduce([tf.ones((300, 100))], [variable])
        (exchange,) = reducer._exchanges.values()
        exchange.send = sending.__get__(exchange)  # type: ignore[method-assign]  # of this one
        (mean,) = reducer.reduce([tf.fill((300, 100), rank + 1.0)], [variable])
        assert [entry.target.owner for entry in exchange._entries] == [None]
        kept.append(weakref.ref(mean))
        del mean
        gc.collect()
        assert kept[0]() is None

    run_world(2, play, deadline_s=90.0)
