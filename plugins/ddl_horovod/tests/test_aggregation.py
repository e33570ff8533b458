"""Horovod's helpers that add up gradients, eagerly, in a tf.function and in a session, in worlds of threads."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.gradient_aggregation import apply_op_to_not_none_tensors, get_not_none_from_list
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

from ddlcore.errors import InvalidArgument
from ddlcore.process.job import Job
from ddlcore.testing import run_world

# In each pass of rank r: gradients r + 1 of the first variable and 10 * (r + 1) of the second, which is local; None of the
# third. Of two ranks, the average is 1.5, so two passes add up to 3; the local sums are 20 and 40, and half of it each.


def mean(gradients: Any, variables: Any) -> Any:
    return [hvd.allreduce(one, op=hvd.Average) for one in gradients]


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("averages", [False, True])
def test_sums_are_reduced_when_they_are_due(averages: bool, in_function: bool) -> None:
    """The gradients of local variables are only scaled. Passes that are not due apply nothing, but are counted."""

    def program(rank: int, job: Job) -> None:
        shared, local, unused = tf.Variable([0.0]), tf.Variable([0.0]), tf.Variable([0.0])
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        steps = tf.Variable(0, dtype=tf.int64)
        helper = LocalGradientAggregationHelperEager(2, mean, True, averages)
        helper.register_local_var(local)

        def step() -> Any:
            slices = tf.IndexedSlices(tf.constant([10.0 * (rank + 1)]), tf.constant([0]), tf.constant([1]))
            gradients = helper.compute_gradients([tf.constant([rank + 1.0]), slices, None], [shared, local, unused])
            assert gradients[2] is None
            pairs = [(one, variable) for one, variable in zip(gradients, [shared, local]) if one is not None]
            helper.apply_gradients(lambda: plain.apply_gradients(pairs), plain, pairs, global_step=steps)

        run = tf.function(step) if in_function else step
        factor = 2.0 if averages else 1.0
        for passes in range(1, 5):
            run()
            applied = passes // 2
            np.testing.assert_allclose(shared.numpy(), [-3.0 * applied / factor])
            np.testing.assert_allclose(local.numpy(), [-10.0 * (rank + 1) * applied / factor])
            assert int(steps.numpy()) == (passes + 1) // 2

    run_world(2, program)


def test_in_a_session() -> None:
    """The helper works with an optimizer of tf.compat.v1.train, as Horovod's own optimizer uses it."""

    def program(rank: int, job: Job) -> None:
        with tf.Graph().as_default():
            x = tf.compat.v1.Variable([0.0], use_resource=True)
            steps = tf.compat.v1.train.get_or_create_global_step()
            plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            legacy = hvd.LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY
            helper = hvd.LocalGradientAggregationHelper(3, mean, False, False, rank, legacy, name="mine")
            (gradient,) = helper.compute_gradients([tf.constant([rank + 1.0])], [x])
            pairs = [(gradient, x)]
            train = helper.apply_gradients(lambda: plain.apply_gradients(pairs, steps), plain, pairs, global_step=steps)
            with tf.compat.v1.Session() as session:
                session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
                seen = []
                for _ in range(6):
                    session.run(train)
                    seen.append([session.run(x).item(), int(session.run(steps))])
        assert seen == [[0.0, 1], [0.0, 2], [-4.5, 3], [-4.5, 4], [-4.5, 5], [-9.0, 6]]

    run_world(2, program)


def test_what_the_helpers_refuse() -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match="must be > 0"):
        LocalGradientAggregationHelperEager(0, mean, False, False)
    helper = LocalGradientAggregationHelperEager(2, mean, False, False)
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(InvalidArgument, match="sparse_as_dense=True"):
        helper.compute_gradients([slices], [tf.Variable(tf.ones((3, 2)))])


def test_lists_with_nones() -> None:
    """One function takes the Nones out, and the other one leaves them where they are."""
    assert get_not_none_from_list([1, None, 0]) == [1, 0]
    assert apply_op_to_not_none_tensors(lambda one, by: one * by, [2, None], 3) == [6, None]
