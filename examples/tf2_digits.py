"""Learns handwritten digits (scikit-learn's, real data) with tf.GradientTape on every rank of `ddl run -np N`."""

import argparse
import hashlib
from typing import Any

import ddl_tf as ddl
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def digits() -> tuple[Any, Any, Any, Any]:
    """Return 1500 training images and labels, and 297 test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images, labels = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPool2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def digest(model: keras.Model) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for weights in model.get_weights():
        seen.update(weights.tobytes())
    return seen.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    parser.add_argument("--checkpoint", help="begin of the names of the files to keep the state in, after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    ddl.init()
    keras.utils.set_random_seed(1 + ddl.rank())  # the same result each time
    first = ddl.rank() == 0
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[ddl.local_rank()], "GPU")
    images, labels, test_images, test_labels = digits()
    model = network()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lr = args.lr * ddl.size()
    optimizer = keras.optimizers.Adam(lr)
    optimizer.build(model.trainable_variables)  # makes its variables, for the restore and the broadcast below
    done = tf.Variable(0, dtype=tf.int64, name="epochs_done")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    if args.resume and first:
        checkpoint.read(args.checkpoint).assert_consumed()
    ddl.broadcast_variables([*model.variables, *optimizer.variables, done], root_rank=0)
    optimizer.learning_rate.assign(lr)  # the checkpoint may come from another number of ranks

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow has no types
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = ddl.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    share = len(labels) // ddl.size()  # images of each rank: all ranks take as many steps
    for epoch in range(int(done), args.epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))[ddl.rank() :: ddl.size()][:share]
        for begin in range(0, share, args.batch):
            rows = order[begin : begin + args.batch]
            loss = step(tf.constant(images[rows]), tf.constant(labels[rows]))
        done.assign(epoch + 1)
        if first:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)
            if args.checkpoint:
                checkpoint.write(args.checkpoint)

    accuracy = np.mean(np.argmax(model(test_images), axis=1) == test_labels)
    if first:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
