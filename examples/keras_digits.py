"""Learns handwritten digits (scikit-learn's, real data) with Keras's model.fit on every rank of `ddl run -np N`."""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import ddl_tf.keras as ddl
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
    parser.add_argument("--checkpoints", type=Path, help="folder to keep the model in, after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    ddl.init()
    first = ddl.rank() == 0
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[ddl.local_rank()], "GPU")
    keras.utils.set_random_seed(1 + ddl.rank())
    images, labels, test_images, test_labels = digits()
    mine = np.arange(len(labels))[ddl.rank() :: ddl.size()][: len(labels) // ddl.size()]  # equal on all ranks
    lr = args.lr * ddl.size()

    begin = 0
    if args.resume:
        last = max(args.checkpoints.glob("*.keras"))
        begin = int(last.stem)
        model = ddl.load_model(last)  # its optimizer is a distributed one again
        model.optimizer.learning_rate = lr  # the checkpoint may come from another number of ranks
    else:
        model = network()
        model.compile(
            optimizer=ddl.DistributedOptimizer(keras.optimizers.Adam(lr)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    callbacks = [
        ddl.callbacks.BroadcastGlobalVariablesCallback(0),
        ddl.callbacks.MetricAverageCallback(),
        ddl.callbacks.LearningRateWarmupCallback(initial_lr=lr, warmup_epochs=2),
    ]
    if first and args.checkpoints:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoints / "{epoch:03d}.keras"))
    model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch,
        initial_epoch=begin,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2 if first else 0,
    )

    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if first:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
