"""Learns handwritten digits by a TensorFlow 1 session on every rank that `ddl run -np N` starts."""

import argparse
import hashlib
from typing import Any

import ddl_tf as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--train-logs", help="folder to keep checkpoints in, and to go on from")
args = parser.parse_args()

tf.disable_eager_execution()  # as it was in TensorFlow 1
tf.logging.set_verbosity(tf.logging.ERROR)  # otherwise it warns against using it


def digits() -> tuple[Any, Any, Any, Any]:
    """Return 1500 training images and labels, and 297 test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(labels))
    images, labels = images[order].reshape(-1, 8, 8, 1).astype("float32") / 4, labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def network(images: Any) -> Any:
    with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
        near = tf.nn.conv2d(images, tf.get_variable("near", (3, 3, 1, 16)), padding="SAME")  # (rows, 8, 8, 16)
        wide = tf.nn.conv2d(tf.nn.relu(near), tf.get_variable("wide", (3, 3, 16, 32)), padding="SAME")
        flat = tf.reshape(tf.nn.max_pool(tf.nn.relu(wide), 2, 2, "VALID"), (-1, 512))
        return flat @ tf.get_variable("classes", (512, 10)) + tf.get_variable("bias", (10,))


class Result(tf.train.SessionRunHook):  # type: ignore[misc] # TensorFlow has no types
    """Reports the accuracy and a digest of the parameters before the session closes."""

    def begin(self) -> None:
        self.right = tf.equal(tf.argmax(network(test_images), axis=1), test_labels)

    def end(self, session: Any) -> None:
        right, parameters = session.run([self.right, tf.trainable_variables()])
        if hvd.rank() == 0:
            print(f"test accuracy {100 * right.mean():.1f} %")
        digest = hashlib.sha256(b"".join(each.tobytes() for each in parameters)).hexdigest()[:12]
        print(f"rank {hvd.rank()} of {hvd.size()}: parameters {digest}", flush=True)


# fmt: off
# Initialize ddl
hvd.init()
tf.set_random_seed(1 + hvd.rank())  # the same result each time

# Pin GPU to be used to process local rank (one GPU per process)
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

# Build model...
images, labels, test_images, test_labels = digits()
mine = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
batches = mine.shuffle(len(labels), seed=hvd.rank()).repeat().batch(32)
batch_images, batch_labels = tf.data.make_one_shot_iterator(batches).get_next()
logits = network(batch_images)
with tf.control_dependencies([logits]):
    counted = tf.train.get_or_create_global_step().assign_add(1)
with tf.control_dependencies([counted]):
    loss = tf.losses.sparse_softmax_cross_entropy(batch_labels, logits)
opt = tf.train.AdagradOptimizer(0.01 * hvd.size())

# Add ddl's Distributed Optimizer
opt = hvd.DistributedOptimizer(opt)

# Add hook to broadcast variables from rank 0 to all other processes during
# initialization.
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
hooks += [tf.train.StopAtStepHook(last_step=args.steps), Result()]

# Make training operation
train_op = opt.minimize(loss)

# Save checkpoints only on worker 0 to prevent other workers from corrupting them.
checkpoint_dir = args.train_logs if hvd.rank() == 0 else None

# The MonitoredTrainingSession takes care of session initialization,
# restoring from a checkpoint, saving to a checkpoint, and closing when done
# or an error occurs.
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir,
                                       config=config,
                                       hooks=hooks) as mon_sess:
  while not mon_sess.should_stop():
    # Perform synchronous training.
    mon_sess.run(train_op)
