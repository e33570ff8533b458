"""Averages of integers keep their type, are exact and are truncated toward zero, both dense and as slices."""

from __future__ import annotations

from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.averages import average_of_slices, divided
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from plugins.ddl_tf.tests.worlds import MODES, SIZE, evaluate, ranks

pytestmark = pytest.mark.timeout(120)

INTEGERS = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64]
ROWS = {0: [0, 2, 2], 1: [2, 3, 0], 2: [1, 2, 3]}  # the index of each slice, by rank
SIGNED = {0: [5, -1, -1], 1: [-1, -7, -6], 2: [4, 1, -1]}  # the value of each slice, by rank
UNSIGNED = {0: [5, 1, 1], 1: [1, 7, 6], 2: [4, 1, 1]}


def truncated(total: Any, count: int) -> Any:
    """Return the quotient of Python integers, truncated toward zero."""
    return np.array([abs(int(one)) // count * (1 if one >= 0 else -1) for one in total])


def expected(values: dict[int, list[int]]) -> Any:
    """Return the dense average of all ranks' slices."""
    total = np.zeros(4, np.int64)
    for rank, rows in ROWS.items():
        np.add.at(total, rows, values[rank])
    return truncated(total, len(ROWS))


def test_slices_of_uint64_are_summed_only() -> None:
    """The average would be computed with int64, in which the largest values are negative."""

    def play(rank: int) -> None:
        slices = tf.IndexedSlices(
            tf.fill((1, 2), tf.constant(2**64 - 1 - rank, tf.uint64)), tf.constant([rank]), tf.constant([4, 2])
        )
        total = ddl.allreduce(slices, op=ddl.Sum)
        assert total.values.numpy().tolist() == [[2**64 - 1 - r] * 2 for r in range(SIZE)]
        with pytest.raises(ValueError, match="average of slices of uint64"):
            ddl.allreduce(slices, op=ddl.Average)

    ranks(play)


@MODES
def test_slices_of_integers(mode: str) -> None:
    """The average of integer IndexedSlices has their type, and equals the average of the dense tensors.

    For the collective and for the reduction of gradients, alone and in one group with dense tensors.
    """

    def play(rank: int) -> None:
        for dtype in INTEGERS:
            own = UNSIGNED if dtype.is_unsigned else SIGNED
            mean = expected(own)
            reducer = Reducer(Reduction(), f"integers.{dtype.name}")

            def build(values: Any, indices: Any, dense: Any, reducer: Any = reducer) -> Any:
                slices = tf.IndexedSlices(values, indices, tf.constant([4]))
                group = ddl.grouped_allreduce([dense, slices])
                gradients = reducer.reduce([dense, slices], [dense, values])
                return ddl.allreduce(slices), group[0], group[1], *gradients

            mine = np.zeros(4, np.int64)
            np.add.at(mine, ROWS[rank], own[rank])
            given = tf.constant(own[rank], dtype), tf.constant(ROWS[rank]), tf.constant(mine, dtype)
            for result in evaluate(mode, build, *given):
                name = f"{dtype.name} as {type(result).__name__}"
                values = result
                if hasattr(result, "indices"):
                    assert result.values.dtype == dtype.as_numpy_dtype, name
                    assert sorted(result.indices) == [0, 1, 2, 3], name
                    values = np.zeros(4, np.int64)
                    values[result.indices] = result.values
                else:
                    assert result.dtype == dtype.as_numpy_dtype, name
                np.testing.assert_array_equal(values, mean, name)

    ranks(play)


def test_floats_keep_every_slice() -> None:
    """The rows of floating-point slices are joined and divided."""
    values, indices = average_of_slices(tf.constant([3.0, 6.0]), tf.constant([1, 1]), 3)
    assert values.numpy().tolist() == [1.0, 2.0]
    assert indices.numpy().tolist() == [1, 1]


def test_great_integers_are_exact() -> None:
    """Averages are exact for int64 values whose sum overflows int64, and for values that float64 cannot tell apart."""
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    everyones = [
        [low, high, 2**53 + 1, -(2**53) - 1, -1],
        [low, high, 2**53 + 1, -(2**53) - 1, 0],
        [low, high, 0, 0, -1],
    ]
    values = tf.constant([one for row in everyones for one in row], tf.int64)
    means, indices = average_of_slices(values, tf.constant(list(range(5)) * 3), 3)
    assert indices.numpy().tolist() == list(range(5))
    np.testing.assert_array_equal(means, truncated([sum(column) for column in zip(*everyones, strict=True)], 3))
    matrix, _ = average_of_slices(tf.reshape(values, (3, 5)), tf.constant([7, 7, 7]), 3)
    np.testing.assert_array_equal(matrix[0], means)


def test_a_rank_s_own_integers_are_divided_as_an_average_would() -> None:
    """A rank's local integer gradients keep their type, and are truncated toward zero."""
    halves = divided(tf.constant([-3, 3, -1, 4], tf.int32), 2)
    assert (halves.dtype, halves.numpy().tolist()) == (tf.int32, [-1, 1, 0, 2])
