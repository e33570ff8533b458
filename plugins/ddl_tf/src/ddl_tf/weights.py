"""Turns the weights of the ranks into each rank's share of an average, eagerly and in graphs.

The sum of the weights is reduced before the gradients: then each rank multiplies its gradients by a factor of at most 1,
which no type is too small for. In a graph this happens while the gradients are still computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf.autograd import Call, allreduce
from ddlcore.api import ProcessSet, Share, checked_weight, current_job, membership, reciprocal_of
from ddlcore.contracts import JobService
from ddlcore.errors import InvalidArgument
from ddlcore.types import Sum


def check_given(weight: Any, process_set: ProcessSet) -> None:
    """Raise InvalidArgument if ``weight`` is a number or Share that cannot be a weight; tensors are checked when used."""
    if not callable(weight) and not _is_tensor(weight):
        checked_weight(weight, _members(process_set))


def share_of(weight: Any, job: JobService, process_set: ProcessSet, name: str) -> Any:
    """Return this rank's share of the average as a float64 scalar. Every member of the process set must call it.

    ``weight`` is a number, a Share, a tensor, a variable, or a function that returns a number or a Share; in a graph,
    the function is called each time the graph runs. Messages call the sum of the weights ``name``. Raises
    InvalidArgument if ``weight`` is no weight, or if the weights of all ranks are 0. An error that is found while a
    graph runs is TensorFlow's InvalidArgumentError instead.
    """
    asked = weight() if callable(weight) and not _is_tensor(weight) else weight
    if _is_tensor(asked):
        value = _checked(tf.reshape(tf.cast(tf.convert_to_tensor(asked), tf.float64), ()))
    else:
        checked = checked_weight(asked, _members(process_set))
        value = _now(weight, process_set) if callable(weight) else tf.constant(_plain(checked), tf.float64)
        if isinstance(checked, Share):
            return value
    call = Call(job, process_set, name, Sum)
    (total,) = allreduce(call, [value])
    if tf.executing_eagerly():
        return value * reciprocal_of(float(total), "gradient")
    message = f"{name}: the weights of all ranks are 0, so the average is not defined"
    with tf.control_dependencies([tf.debugging.assert_positive(total, message)]):
        return value / total


def weighed(gradient: Any, share: Any) -> Any:
    """Return ``share * gradient``; 0 for a share of 0, also for NaN. Raises InvalidArgument for integers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(weighed(gradient.values, share), gradient.indices, gradient.dense_shape)
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        raise InvalidArgument(f"weight= needs gradients of floating point, not {gradient.dtype.name}")
    return tf.where(share > 0, gradient * tf.cast(share, gradient.dtype), tf.zeros_like(gradient))


def _members(process_set: ProcessSet) -> int:
    return len(membership(current_job(), process_set).ranks)


def _plain(weight: float | Share) -> float:
    return weight.factor if isinstance(weight, Share) else weight


def _is_tensor(weight: Any) -> bool:
    return isinstance(weight, (tf.Tensor, tf.Variable)) or hasattr(
        weight, "_value"
    )  # the last is a variable of Keras 3


def _checked(value: Any) -> Any:
    """Return the scalar ``value`` if it is finite and not negative; raise InvalidArgument, or its like in a graph."""
    if tf.executing_eagerly():
        checked_weight(float(value), 1)
        return value
    text = "weight is not a finite number of 0 or more"
    right = tf.logical_and(tf.math.is_finite(value), value >= 0)
    with tf.control_dependencies([tf.debugging.Assert(right, [text, value])]):
        return tf.identity(value)


def _now(weight: Callable[[], Any], process_set: ProcessSet) -> Any:
    """Return the scalar that the function gives now, or in a graph, each time it runs."""

    def run(*_: Any) -> Sequence[Any]:
        return [np.float64(_plain(checked_weight(weight(), _members(process_set))))]

    if tf.executing_eagerly():
        return tf.constant(run()[0], tf.float64)
    (value,) = tf.numpy_function(run, [], [tf.float64], name="DdlWeight")
    value.set_shape([])
    return value
