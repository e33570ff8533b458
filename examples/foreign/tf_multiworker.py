"""TensorFlow's own data-parallel training, unchanged under `ddl run`: it reads the TF_CONFIG that the launcher sets.

    ddl run -np 2 python examples/foreign/tf_multiworker.py

Nothing of ddl is imported. The training loop is written out because `fit` of Keras 3 does not work with
MultiWorkerMirroredStrategy.
"""

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # reads the variable above when it is imported
from sklearn.datasets import load_digits

BATCH = 64  # images for each worker and step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any other call of TensorFlow
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    worker, workers = config.get("task", {}).get("index", 0), strategy.num_replicas_in_sync

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16.0).astype("float32"), labels.astype("int64")
    train, test = slice(0, 1500), slice(1500, None)
    mine = tf.data.Dataset.from_tensor_slices((images[train][worker::workers], labels[train][worker::workers]))
    batches = iter(mine.shuffle(1500, seed=worker).repeat().batch(BATCH))

    tf.random.set_seed(1)
    with strategy.scope():
        weights = [
            tf.Variable(tf.random.stateless_normal([64, 64], seed=[1, 1]) * 0.15),
            tf.Variable(tf.zeros([64])),
            tf.Variable(tf.random.stateless_normal([64, 10], seed=[1, 2]) * 0.15),
            tf.Variable(tf.zeros([10])),
        ]

    def logits(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x @ weights[0] + weights[1]) @ weights[2] + weights[3]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(x)))
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(0.5 * gradient)
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, loss)

    train_step = tf.function(lambda x, y: strategy.run(step, args=(x, y)))

    for number in range(1, options.steps + 1):
        loss = train_step(*next(batches))
        if worker == 0 and number % 50 == 0:
            print(f"step {number}: loss {float(loss):.3f}")

    right = tf.argmax(logits(images[test]), axis=1) == labels[test]
    digest = float(tf.add_n([tf.reduce_sum(tf.abs(weight)) for weight in weights]))
    print(
        f"worker {worker} of {workers}: test accuracy {float(tf.reduce_mean(tf.cast(right, tf.float32))):.3f}, sum {digest:.6f}"
    )


if __name__ == "__main__":
    main()
