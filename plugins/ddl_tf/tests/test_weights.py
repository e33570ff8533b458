"""Averages of gradients that count each rank by its weight, eagerly and in graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf

from ddlcore.errors import DdlInternalError
from ddlcore.testing import run_world
from plugins.ddl_tf.tests.worlds import Seat, seated, seats

pytestmark = pytest.mark.timeout(120)

GRAPHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
RNG = np.random.default_rng(7)
INPUTS, TARGETS, WORDS = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 3)), np.arange(8) % 5
KERNEL, TABLE = RNG.normal(size=(6, 3)), RNG.normal(size=(5, 3))


@pytest.fixture(autouse=True)
def graphs_act_for_ranks() -> Iterator[None]:
    with seats():
        yield


def loss_of(variables: list[Any], x: Any, y: Any, words: Any) -> Any:
    """Return the mean over the rows. The gradient of the second variable is sparse."""
    return tf.reduce_mean((tf.matmul(x, variables[0]) + tf.gather(variables[1], words) - y) ** 2)


@GRAPHS
def test_ranks_with_3_and_5_rows_give_the_gradients_of_8(graph: bool) -> None:
    """The weight may be a number, a tensor, a variable, a function of a number or a share, and a share.

    Eagerly, one of the gradients is sparse.
    """

    def play(rank: int, job: Any) -> None:
        rows, here = (3, slice(0, 3)) if rank == 0 else (5, slice(3, 8))
        variables, counter = [tf.Variable(KERNEL), tf.Variable(TABLE)], tf.Variable(float(rows))
        ways: dict[str, Callable[[Any], Any]] = {
            "tensor": lambda x: tf.shape(x)[0],
            "variable": lambda x: counter,
            "function": lambda x: lambda: rows,
            "function of a share": lambda x: lambda: ddl.Share(rows, 8, 2),
        }
        if not graph:
            ways |= {"number": lambda x: rows, "share": lambda x: ddl.Share(rows, 8, 2)}
        sources = variables[:1] if graph else variables

        def gradients(x: Any, y: Any, words: Any) -> dict[str, Any]:
            results = {}
            for way, weight_of in ways.items():
                with ddl.DistributedGradientTape(tf.GradientTape(), weight=weight_of(x)) as tape:
                    loss = loss_of(variables, x, y, words)
                results[way] = [tf.convert_to_tensor(one) for one in tape.gradient(loss, sources)]
            return results

        with tf.GradientTape() as tape:
            loss = loss_of(variables, tf.constant(INPUTS), tf.constant(TARGETS), tf.constant(WORDS))
        whole = [tf.convert_to_tensor(one) for one in tape.gradient(loss, sources)]
        with seated(Seat(job)):
            run = tf.function(gradients) if graph else gradients
            found = run(*(tf.constant(part[here]) for part in (INPUTS, TARGETS, WORDS)))
        for way, means in found.items():
            for mean, expected in zip(means, whole, strict=True):
                np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12, err_msg=way)

    run_world(2, play)


@GRAPHS
def test_a_weight_that_is_0_counts_nothing(graph: bool) -> None:
    """A gradient of weight 0 does not count, even if it is NaN. If all weights are 0, all ranks raise an error."""

    def play(rank: int, job: Any) -> None:
        variable = tf.Variable([1.0, 2.0])

        def gradient(weight: Any, factor: Any) -> Any:
            with ddl.DistributedGradientTape(tf.GradientTape(), weight=weight) as tape:
                loss = tf.reduce_sum(variable * factor)
            return tape.gradient(loss, variable)

        run = tf.function(gradient) if graph else gradient
        weight, factor = (2.0, 3.0) if rank else (0.0, float("nan"))
        assert run(tf.constant(weight), tf.constant(factor)).numpy().tolist() == [3.0, 3.0]
        with pytest.raises((ValueError, DdlInternalError, tf.errors.OpError), match="weights of all ranks are 0"):
            run(tf.constant(0.0), tf.constant(1.0))

    run_world(2, play)


@GRAPHS
def test_weights_that_change_send_no_control_message(graph: bool) -> None:
    """Steps whose weights differ from step to step are replayed like any others."""
    measured = threading.Barrier(2)  # a rank that ended would leave the world, and the other would count that message

    def play(rank: int, job: Any) -> int:
        variables = [tf.Variable(tf.ones((40, 3))) for _ in range(4)]

        def gradients(weight: Any) -> Any:
            with ddl.DistributedGradientTape(tf.GradientTape(), weight=weight) as tape:
                loss = tf.add_n([tf.reduce_sum(one) for one in variables]) * (1.0 + rank)
            return tape.gradient(loss, variables)

        run = tf.function(gradients) if graph else gradients
        before = 0
        for turn in range(30):
            if turn == 20:
                before = job.stats()["control_messages"]
            results = run(tf.constant(1.0 + turn * rank))
            expected = (1 + 2 * (1 + turn)) / (2 + turn)
            np.testing.assert_allclose(results[3], np.full((40, 3), expected), rtol=1e-5)
        messages: int = job.stats()["control_messages"] - before
        measured.wait(80.0)
        return messages

    assert run_world(2, play) == [0, 0]


def test_weights_that_cannot_be_are_refused() -> None:
    """What is no weight, and what a weight cannot be combined with, is refused when the tape is made."""

    def play(rank: int, job: Any) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"weight": -1}, "not negative"),
            ({"weight": "1"}, "is a str"),
            ({"weight": 1, "op": ddl.Sum}, "op=Sum"),
            ({"weight": 1, "gradient_predivide_factor": 2.0}, "prescale_factor=0.5"),
            ({"weight": ddl.Share(1, 2, 5)}, "for 5 ranks"),
        ]
        for options, words in wrong:
            with pytest.raises(ValueError, match=words):
                ddl.DistributedGradientTape(tf.GradientTape(), **options)
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        with pytest.raises(ValueError, match=r"tf\.compat\.v1\.train has none"):
            ddl.DistributedOptimizer(inner, weight=1)
        with ddl.DistributedGradientTape(tf.GradientTape(), weight=partial(float, "nan")) as tape:
            variable = tf.Variable(1.0)
            loss = variable * 2.0
        with pytest.raises(ValueError, match="finite"):
            tape.gradient(loss, variable)

    run_world(2, play)
