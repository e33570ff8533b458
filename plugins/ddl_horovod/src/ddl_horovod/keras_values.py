"""The collectives of horovod.keras: they take what tf.constant takes, and return tensors eagerly, NumPy values otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ddl_tf.compression import Compression
from ddl_tf.keras import values

from ddlcore.types import Average


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the values of all ranks combined by ``op``; see ``ddl_tf.keras.allreduce``."""
    given = (name, average, prescale_factor, postscale_factor, op, compression)
    return _run(lambda one: values.allreduce(one, *given), value)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, joined along the first dimension, in which alone they may differ."""
    return _run(lambda one: values.allgather(one, name), value)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank`` on every rank."""
    return _run(lambda one: values.broadcast(one, root_rank, name), value)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Combine the values of all ranks by ``op``, and return this rank's rows of the result."""
    return _run(lambda one: values.reducescatter(one, name, op), value)


def _run(verb: Callable[[Any], Any], value: Any) -> Any:
    """Return the result of ``verb`` for ``value``, which gets the type that tf.constant gives it: float32 for a float."""
    if tf.executing_eagerly():
        return tf.constant(verb(tf.constant(value)))
    return verb(tf.make_ndarray(tf.make_tensor_proto(value)))
