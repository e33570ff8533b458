"""A script as Horovod's documentation has it for TensorFlow 1: a graph and a session. Not a line of it is ddl's."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
hvd.init()
x = tf.placeholder(tf.float32, [None, 1])
slope = tf.get_variable("slope", [1, 1], initializer=tf.random_uniform_initializer(seed=hvd.rank()))
loss = tf.reduce_mean(tf.square(tf.matmul(x, slope) - 3 * x))
step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1 * hvd.size()))
train = optimizer.minimize(loss, global_step=step)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=60)]
batches = np.random.default_rng(hvd.rank())
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        _, found = session.run([train, slope], feed_dict={x: batches.random((32, 1))})
if hvd.rank() == 0:
    print("learned" if abs(found.item() - 3) < 0.1 else f"slope {found.item()}")
