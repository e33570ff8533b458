"""Learns handwritten digits with the tf.keras of TensorFlow 2.0 (today's tf_keras) on every rank of `ddl run`."""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # makes tf.keras be tf_keras, whose compile takes the arguments used below

import ddl_tf.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def digits() -> tuple[Any, Any, Any, Any]:
    """Return 1500 training images and labels, and 297 test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images, labels = images[order].astype("float32") / 16, labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def digest(model: tf.keras.Model) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for weights in model.get_weights():
        seen.update(weights.tobytes())
    return seen.hexdigest()[:12]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--checkpoints", type=Path, help="folder to keep the model in, after every epoch")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
args = parser.parse_args()

hvd.init()
tf.keras.utils.set_random_seed(1 + hvd.rank())  # the same result each time
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices([gpus[hvd.local_rank()]], "GPU")

images, labels, test_images, test_labels = digits()
mine = np.arange(len(labels))[hvd.rank() :: hvd.size()][: len(labels) // hvd.size()]  # the same number on every rank

learning_rate = 0.001
learning_rate *= hvd.size()
begin = 0
if args.resume:
    last = max(args.checkpoints.glob("*.h5"))
    begin = int(last.stem)
    model = hvd.load_model(last)
    model.optimizer.learning_rate = learning_rate  # the checkpoint may come from another number of ranks
else:
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, activation="relu", input_shape=(64,)),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = tf.keras.optimizers.Adam(learning_rate)
    opt = hvd.DistributedOptimizer(opt)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )

callbacks = []
callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
if hvd.rank() == 0 and args.checkpoints:
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(args.checkpoints / "{epoch:03d}.h5")))

model.fit(
    images[mine],
    labels[mine],
    batch_size=32,
    initial_epoch=begin,
    epochs=args.epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)

_, accuracy = model.evaluate(test_images, test_labels, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy {100 * accuracy:.1f} %")
print(f"rank {hvd.rank()} of {hvd.size()}: parameters {digest(model)}", flush=True)
