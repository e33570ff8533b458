"""Runs collectives on Python and NumPy values, for callbacks and scripts. Uses no graph and no session for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf.broadcast import broadcast_global_variables as the_operation
from ddl_tf.compression import Compression
from ddlcore.api import UserCompressor, arrays, resolve_op, wire_compression
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
    """Return the values of all ranks combined by ``op``, as a NumPy value.

    If neither ``op`` nor ``average`` is given, the operation is Average. Every rank must call this function with a
    value of the same shape and type.
    """
    reduce_op = resolve_op(op, average)
    wire, user = wire_compression(compression)
    if user is not None:
        return _by_the_users(user, value, name, reduce_op, prescale_factor, postscale_factor)
    result = arrays.allreduce(_array(value), name, reduce_op, prescale_factor, postscale_factor, compression=wire)
    return _value(result)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, joined along the first dimension.

    The values may differ between ranks in the size of the first dimension only.
    """
    return _value(arrays.allgather(_array(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank`` on every rank. All ranks must pass a value of the same shape and type."""
    return _value(arrays.broadcast(_array(value), root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Combine the values of all ranks by ``op``, and return this rank's rows of the result."""
    return _value(arrays.reducescatter(_array(value), name, resolve_op(op)))


def broadcast_global_variables(root_rank: int) -> None:
    """Assign to the global variables of the default graph the values that they have on ``root_rank``.

    This function uses the default session, or Keras' session if there is no default session. Raises RuntimeError in
    eager mode, where there are no global variables; use broadcast_variables or the callback in eager mode.
    """
    operation = the_operation(root_rank)
    session = tf.compat.v1.get_default_session() or tf.compat.v1.keras.backend.get_session()
    session.run(operation)


def _by_the_users(
    compressor: UserCompressor, value: Any, name: str | None, op: Any, prescale: float, postscale: float
) -> Any:
    packed, ctx = compressor.compress(tf.convert_to_tensor(_array(value)))
    reduced = arrays.allreduce(_array(packed), name, op, prescale, postscale)
    return _value(np.asarray(compressor.decompress(tf.convert_to_tensor(reduced), ctx)))


def _array(value: Any) -> Any:
    return np.require(np.asarray(value), requirements="C")


def _value(array: Any) -> Any:
    """Return a NumPy scalar if ``array`` has no dimensions, otherwise ``array``."""
    return array[()] if array.ndim == 0 else array
