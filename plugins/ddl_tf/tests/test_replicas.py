"""The ranks' variables are compared before each step except the first.

Deliberate faults are found, also in a tf.function.
"""

from __future__ import annotations

import logging
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf

from ddlcore.api import Job
from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(150)
PATIENT: dict[str, object] = {"leave_timeout_s": 30.0, "start_timeout_s": 30.0, "open_timeout_s": 30.0}


def train(rank: int, mode: str, steps: int, flip: int = 0) -> list[Any]:
    """Make steps of a tape on two variables; one element on rank 1 changes before step ``flip``."""
    weights = [
        tf.Variable(np.full((3, 2), 0.5, np.float32), name="kernel"),
        tf.Variable(np.zeros(2, np.float32), name="bias"),
    ]
    own = tf.Variable(float(rank))  # a part of the model that is local to each rank

    def step(x: Any) -> None:
        tape = ddl.DistributedGradientTape(tf.GradientTape())
        tape.register_local_source(own)
        with tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weights[0]) + weights[1] + own))
        variables = [*weights, own]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(step) if mode == "function" else step
    random = np.random.default_rng(rank)
    for number in range(1, steps + 1):
        if number == flip and rank == 1:
            weights[1].assign(weights[1] + [0.0, 1e-6])
        run(tf.constant(random.standard_normal((4, 3)), tf.float32))
    ddl.verify(weights)
    return weights


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_changed_element_is_found(mode: str) -> None:
    """Every rank learns the variable and the last step in which the ranks agreed.

    Local sources, which differ by design, are not compared.
    """
    raised: list[str] = []

    def rank(rank: int, job: Job) -> None:
        try:
            train(rank, mode, steps=400, flip=7)
        except Exception as error:  # in a graph TensorFlow raises an error of its own, which contains the message
            raised.append(str(error))

    run_world(2, rank, settings={"verify_every": 3, **PATIENT}, deadline_s=120)
    assert len(raised) == 2
    for text in raised:
        assert "the first tensor that differs is 1: bias (float32 2)" in text
        assert "after its step 6)" in text, "what changes behind a step is seen before the next"
        assert "agreed: 3" in text


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_equal_variables_are_left_alone(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """A correct training logs nothing, and runs to its end."""
    with caplog.at_level(logging.WARNING, "ddl"):
        run_world(2, lambda rank, job: train(rank, mode, 8), settings={"verify_every": 1, **PATIENT}, deadline_s=120)
    assert "parameters differ" not in caplog.text


def test_verify_takes_what_holds_variables() -> None:
    """verify() accepts variables, a dict of them, tensors and a tf.Module, and raises on every rank if one differs."""

    def rank(rank: int, job: Job) -> None:
        module = tf.Module()
        module.kernel = tf.Variable(np.ones((2, 2)), name="kernel")
        module.moving = tf.Variable(float(rank), trainable=False)
        ddl.verify(module)
        ddl.verify({"kernel": module.kernel, "tensor": tf.constant([1, 2])})
        with pytest.raises(ddl.ReplicasDiffer) as info:
            ddl.verify([module.kernel, module.moving])
        assert info.value.groups == ((0,), (1,))
        assert info.value.distances == {1: 1.0}
        with pytest.raises(ValueError, match="is no variable"):
            ddl.verify([object()])

    run_world(2, rank, settings=PATIENT, deadline_s=120)
