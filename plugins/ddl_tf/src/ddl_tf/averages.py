"""Divides gathered or local tensors by a count without changing their type: integer quotients are truncated."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ddlcore.errors import InvalidArgument


def divided(tensor: Any, count: Any) -> Any:
    """Return ``tensor / count`` in the tensor's type. Integers are truncated toward zero, as in a dense average."""
    if tensor.dtype.is_integer:
        return tf.cast(tf.truncatediv(tf.cast(tensor, tf.int64), tf.cast(count, tf.int64)), tensor.dtype)
    return tensor / tf.cast(count, tensor.dtype)


def average_of_slices(values: Any, indices: Any, count: Any) -> tuple[Any, Any]:
    """Return (values, indices) of slices whose dense form is the average of the slices of ``count`` members.

    The arguments ``values`` and ``indices`` are those of all members, joined. Floating-point values are divided one by
    one. Integer values of the same index are added before the division, because the sum of truncated quotients would
    differ from the truncated average. So with integers, each index occurs once in the result.
    """
    if not values.dtype.is_integer:
        return divided(values, count), indices
    if values.dtype == tf.uint64:  # the sums below are of int64
        raise InvalidArgument("the average of slices of uint64 is not available; use Sum, or cast the values to int64")
    unique, place = tf.unique(indices)
    rows = tf.size(unique)
    # The sum of int64 values may overflow although their average does not, so quotients and remainders are added
    # separately.
    wide, by = tf.cast(values, tf.int64), tf.cast(count, tf.int64)
    quotients = tf.math.unsorted_segment_sum(wide // by, place, rows)
    remainders = tf.math.unsorted_segment_sum(wide % by, place, rows)
    floor, left = quotients + remainders // by, remainders % by
    truncated = floor + tf.cast((floor < 0) & (left > 0), tf.int64)
    return tf.cast(truncated, values.dtype), unique
