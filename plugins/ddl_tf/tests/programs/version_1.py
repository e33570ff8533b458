"""One rank of two, with TensorFlow 2 behavior disabled.

Trains with a v1 optimizer, and prints whether it has stepped by the mean gradient.
"""

from __future__ import annotations

import ddl_tf as ddl
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def main() -> None:
    ddl.init()
    weights = [tf.get_variable(f"w{i}", shape, initializer=tf.ones_initializer()) for i, shape in enumerate(SHAPES)]
    table = tf.get_variable("table", (4, 2), initializer=tf.ones_initializer())
    rows = tf.nn.embedding_lookup(table, [ddl.rank(), 3])
    loss = (ddl.rank() + 1.0) * (tf.add_n([tf.reduce_sum(weight) for weight in weights]) + tf.reduce_sum(rows))
    optimizer = ddl.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0))
    train = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    mean = ddl.allreduce(tf.fill([2], ddl.rank() + 1.0))
    begin = ddl.broadcast_global_variables(0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(begin)
        for _ in range(3):
            session.run(train)
        for value in session.run(weights):
            np.testing.assert_array_equal(value, np.full(value.shape, 1.0 - 3 * 1.5))
        np.testing.assert_array_equal(session.run(table)[:, 0], [1 - 3 * 0.5, 1 - 3 * 1.0, 1, 1 - 3 * 1.5])
        np.testing.assert_array_equal(session.run(mean), [1.5, 1.5])
    print("trained by the mean", flush=True)
    ddl.shutdown()


SHAPES = [(), (3,), (3,), (2, 3), (200, 200)]

if __name__ == "__main__":
    main()
