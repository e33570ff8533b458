"""Gradients through every collective follow Horovod's rules, eagerly, in functions and in sessions."""

from __future__ import annotations

from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf

from plugins.ddl_tf.tests.worlds import MODES, SIZE, evaluate, ranks

pytestmark = pytest.mark.timeout(360)


def gradient(mode: str, verb: Any, *tensors: Any) -> list[Any]:
    """Return d sum(outputs * weights) / d tensors, with weights that count up from the rank's own number."""

    def build(*given: Any) -> Any:
        if mode == "session":
            outputs = _listed(verb(*given))
            return tf.compat.v1.gradients(outputs, given, [_weights(output) for output in outputs])
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = _listed(verb(*given))
        return tape.gradient(outputs, given, [_weights(output) for output in outputs])

    return [np.asarray(g) for g in evaluate(mode, build, *tensors)]


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _weights(output: Any) -> Any:
    count = tf.cast(tf.shape(output)[0], tf.float64)
    return tf.range(count) + 100.0 * tf.cast(ddl.rank(), tf.float64)


def weights(rank: int, count: int) -> Any:
    return np.arange(count) + 100.0 * rank


MEAN = np.mean([weights(rank, 6) for rank in range(SIZE)], axis=0)


def x(rank: int, count: int = 6) -> Any:
    return tf.fill((count,), tf.constant(rank + 1.0, tf.float64))


@MODES
def test_complex_numbers(mode: str) -> None:
    """The gradients of complex tensors are averaged as others are."""

    def play(rank: int) -> None:
        values = tf.complex(x(rank), -x(rank))

        def verb(tensor: Any) -> Any:
            return tf.math.real(ddl.allreduce(tensor) * tf.constant(1 + 2j, tf.complex128))

        np.testing.assert_allclose(gradient(mode, verb, values)[0], MEAN * (1 - 2j))

    ranks(play)


@MODES
def test_allreduce(mode: str) -> None:
    """The gradient is the allreduce of the gradient with the same op and scales.

    Integers in a group have no gradient.
    """

    def play(rank: int) -> None:
        np.testing.assert_allclose(gradient(mode, ddl.allreduce, x(rank))[0], MEAN)
        total = gradient(mode, lambda t: ddl.allreduce(t, op=ddl.Sum, prescale_factor=2.0, name="sum"), x(rank))[0]
        np.testing.assert_allclose(total, 2 * SIZE * MEAN)
        for result in gradient(mode, lambda *t: ddl.grouped_allreduce(t), x(rank), x(rank)):
            np.testing.assert_allclose(result, MEAN)
        beside = gradient(mode, lambda t: ddl.grouped_allreduce([t, tf.constant([1, 2])], op=ddl.Sum)[0], x(rank))
        np.testing.assert_allclose(beside[0], SIZE * MEAN)

    ranks(play)


@MODES
def test_allgather(mode: str) -> None:
    """The gradient is the average of the gradients, of which a rank takes the rows that it had contributed."""

    def play(rank: int) -> None:
        mine = slice(sum(range(1, rank + 1)), sum(range(1, rank + 2)))  # the ranks contribute 1, 2 and 3 rows
        np.testing.assert_allclose(gradient(mode, ddl.allgather, x(rank, rank + 1))[0], MEAN[mine])
        for result in gradient(mode, lambda *t: ddl.grouped_allgather(t), x(rank, rank + 1), x(rank, rank + 1)):
            np.testing.assert_allclose(result, MEAN[mine])

    ranks(play)


@MODES
def test_broadcast(mode: str) -> None:
    """The gradient is the average at the root, and zero on other ranks."""

    def play(rank: int) -> None:
        result = gradient(mode, lambda t: ddl.broadcast(t, 1), x(rank))[0]
        np.testing.assert_allclose(result, MEAN if rank == 1 else 0 * MEAN)

    ranks(play)


@MODES
def test_alltoall(mode: str) -> None:
    """The gradient is sent back along the same splits, or equally divided without splits."""

    def play(rank: int) -> None:
        back = np.concatenate([weights(r, 6)[2 * rank : 2 * rank + 2] for r in range(SIZE)])
        np.testing.assert_allclose(gradient(mode, ddl.alltoall, x(rank))[0], back)
        splits = [1, 2, 3]  # rank r receives r + 1 rows from each
        back = np.concatenate([weights(r, 9)[(r + 1) * rank : (r + 1) * (rank + 1)] for r in range(SIZE)])
        np.testing.assert_allclose(gradient(mode, lambda t: ddl.alltoall(t, splits)[0], x(rank))[0], back)

    ranks(play)


@MODES
def test_reducescatter(mode: str) -> None:
    """The gradient is the allgather of the gradient, times the scales, and times the size for Sum."""

    def play(rank: int) -> None:
        parts = np.concatenate([weights(r, 2) for r in range(SIZE)])
        np.testing.assert_allclose(gradient(mode, ddl.reducescatter, x(rank))[0], parts)
        scaled = gradient(mode, lambda t: ddl.reducescatter(t, op=ddl.Sum, postscale_factor=0.5), x(rank))[0]
        np.testing.assert_allclose(scaled, 0.5 * SIZE * parts)
        for result in gradient(mode, lambda *t: ddl.grouped_reducescatter(t), x(rank), x(rank)):
            np.testing.assert_allclose(result, parts)

    ranks(play)


@MODES
def test_slices(mode: str) -> None:
    """The gradient passes through the values of IndexedSlices; their indices have none."""

    def play(rank: int) -> None:
        def verb(values: Any) -> Any:
            return ddl.allreduce(tf.IndexedSlices(values, tf.range(2), tf.constant([6])), op=ddl.Sum).values

        np.testing.assert_allclose(gradient(mode, verb, x(rank, 2))[0], MEAN[2 * rank : 2 * rank + 2])

    ranks(play)


def test_a_sparse_gradient_is_made_dense() -> None:
    """The gradient of a result of which only some rows were looked up becomes dense."""

    def play(rank: int) -> None:
        table = tf.ones([3, 2])
        with tf.GradientTape() as tape:
            tape.watch(table)
            rows = tf.gather(ddl.allreduce(table, op=ddl.Sum), [rank])
        assert tape.gradient(rows, table).numpy().tolist() == [[1.0, 1.0]] * 3

    ranks(play)


def test_second_derivatives() -> None:
    """The gradient is itself differentiable: the second derivative of sum(allreduce(x)³) contains 6·size²·sum."""

    def play(rank: int) -> None:
        value = tf.constant([2.0])
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as inner:
                inner.watch(value)
                cube = ddl.allreduce(value, op=ddl.Sum) ** 3
            first = inner.gradient(cube, value)
        assert first.numpy().tolist() == [3 * 6.0**2 * SIZE]
        assert outer.gradient(first, value).numpy().tolist() == [6 * 6.0 * SIZE**2]

    ranks(play)


@pytest.mark.parametrize("op", [ddl.Min, ddl.Max, ddl.Product])
def test_operations_without_a_gradient(op: int) -> None:
    """Operations without a gradient can be computed; requesting the gradient raises an error that says what to do."""

    def play(rank: int) -> None:
        value = tf.ones(2)
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = ddl.allreduce(value, op=op)
        with pytest.raises(NotImplementedError, match="stop_gradient"):
            tape.gradient(result, value)

    ranks(play, 1)


def test_a_mixed_group_keeps_the_floats_gradients() -> None:
    """Floats in a group with integers keep their gradients; the integers are gathered and have none."""

    def play(rank: int) -> None:
        value = x(rank, 2)
        with tf.GradientTape() as tape:
            tape.watch(value)
            _, gathered = ddl.grouped_allgather([tf.constant([rank]), value])
            loss = tf.reduce_sum(gathered)
        assert tape.gradient(loss, value).numpy().tolist() == [1.0, 1.0]

    ranks(play)
