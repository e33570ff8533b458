"""Divides what ranks have gathered or kept, in its own type: by an average of integers nobody gets floats, or other numbers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["average_of_slices", "divided"]


def divided(tensor: Any, count: int) -> Any:
    """``tensor / count`` in the tensor's type; integers are truncated toward zero, as a dense average of them is."""
    if tensor.dtype.is_integer:
        return tf.cast(tf.truncatediv(tf.cast(tensor, tf.int64), tf.constant(count, tf.int64)), tensor.dtype)
    return tensor / tf.cast(count, tensor.dtype)


def average_of_slices(values: Any, indices: Any, count: int) -> tuple[Any, Any]:
    """(values, indices) of ``count`` members' slices, one behind the other, such that dense they are the average.

    Floats are divided where they stand. Integers of one index are added first, since the average is not the sum of
    their truncated quotients: there, each index comes once.
    """
    if not values.dtype.is_integer:
        return divided(values, count), indices
    unique, place = tf.unique(indices)
    rows = tf.size(unique)
    # Quotients and remainders are added apart, so that no sum of int64 values overflows where their average does not.
    wide, by = tf.cast(values, tf.int64), tf.constant(count, tf.int64)
    quotients = tf.math.unsorted_segment_sum(wide // by, place, rows)
    remainders = tf.math.unsorted_segment_sum(wide % by, place, rows)
    floor, left = quotients + remainders // by, remainders % by
    truncated = floor + tf.cast((floor < 0) & (left > 0), tf.int64)
    return tf.cast(truncated, values.dtype), unique
