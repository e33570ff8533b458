"""Gradients of several passes are summed for each variable, whichever passes had one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from ddl_tf.keras.step import Step


def test_a_pass_without_a_gradient_loses_none() -> None:
    """A gradient from an earlier pass is applied once, with the last pass, even if that has none."""
    variables = [tf.Variable([1.0]), tf.Variable([1.0])]
    step: Any = Step(None, None, None, 2, False)  # type: ignore[arg-type]  # it only sums here
    applied: list[list[Any]] = []

    def apply(sums: list[Any]) -> None:
        applied.append([None if one is None else one.numpy().tolist() for one in sums])

    step.accumulate([tf.constant([2.0]), tf.constant([5.0])], variables, apply)
    step.accumulate([None, tf.constant([7.0])], variables, apply)
    assert applied == [[[2.0], [12.0]]]
    step.accumulate([None, tf.constant([1.0])], variables, apply)
    step.accumulate([None, tf.constant([1.0])], variables, apply)
    assert applied[1:] == [[[0.0], [2.0]]]
