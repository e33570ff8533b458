"""Learns handwritten digits with Keras's model.fit, and goes on when ranks are lost: `ddl run -np 4 --min-np 2`."""

import argparse
import hashlib
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import ddl_tf.keras as ddl
import keras
import numpy as np
from ddl_tf.keras import elastic
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


def batches(images: Any, labels: Any, batch: int, epoch: int, first: int) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's part of each batch of ``batch`` images of the epoch, from batch number ``first`` on.

    The batches of an epoch are the same with any number of ranks, so no image is left out and none is used twice.
    """
    order = np.random.default_rng(epoch).permutation(len(labels))
    for at in range(first * batch, len(labels) - batch + 1, batch):
        mine = order[at : at + batch][ddl.rank() :: ddl.size()]
        yield images[mine], labels[mine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=60, help="images of all ranks together in a step")
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()

    ddl.init()
    images, labels, test_images, test_labels = digits()
    steps = len(labels) // args.batch
    model = network()
    model.compile(
        optimizer=ddl.DistributedOptimizer(keras.optimizers.Adam(args.lr)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    state = elastic.KerasState(model, epoch=0, batch=0)

    @elastic.run
    def train(state: elastic.KerasState) -> None:
        print(f"rank {ddl.rank()} of {ddl.size()} (process {os.getpid()}) begins at step {state.steps}", flush=True)
        callbacks = [
            elastic.UpdateBatchStateCallback(state),
            elastic.UpdateEpochStateCallback(state),
            elastic.CommitStateCallback(state),
        ]
        while state.epoch < args.epochs:
            model.fit(
                batches(images, labels, args.batch, state.epoch, state.batch),
                steps_per_epoch=steps - state.batch,
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                callbacks=callbacks,
                verbose=2 if ddl.rank() == 0 else 0,
            )

    train(state)

    accuracy = 100 * np.mean(model.predict(test_images, verbose=0).argmax(-1) == test_labels)
    if ddl.rank() == 0:
        print(f"test accuracy {accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
