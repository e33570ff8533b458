"""Optimizers of tf.compat.v1.train that make one step of several passes."""

from __future__ import annotations

import ddl_tf as ddl
import pytest
import tensorflow as tf

from plugins.ddl_tf.tests.worlds import ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("averaged", [True, False])
def test_two_passes_of_a_session_are_one_step(averaged: bool) -> None:
    """The gradients of two passes and of both ranks are applied together in each second pass, and in no other."""
    v1 = tf.compat.v1

    def play(rank: int) -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.Variable(tf.zeros((2,)), use_resource=True)
            slope = v1.placeholder(tf.float32, ())
            optimizer = ddl.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=2,
                average_aggregated_gradients=averaged,
            )
            train = optimizer.minimize(slope * tf.reduce_sum(variable))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            found = []
            for given in (1.0, 3.0, 5.0, 9.0):
                session.run(train, {slope: -given - 2.0 * rank})
                found.append(float(session.run(variable)[1]))
            return found

    # The means over the ranks are 2, 4, 6 and 10.
    first, second = (3.0, 11.0) if averaged else (6.0, 22.0)
    assert ranks(play, 2) == [[0.0, first, first, second]] * 2
