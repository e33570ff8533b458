"""Trains in an elastic job, by one of several ways, and kills ranks at random moments; prints the parameters.

Arguments: the way (fit, function, tape or eager), the rollback, a folder for marks, how many ranks are killed, and
a file with the initial weights. With OUTSIDE in the environment, another process kills ranks, as tests/faults/chaos.py does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import ddl_tf.keras as ddl
import numpy as np
import tensorflow as tf
from ddl_tf.tape import DistributedGradientTape

keras = tf.keras
WAY, ROLLBACK, FOLDER, KILLS = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
OUTSIDE = "OUTSIDE" in os.environ
MOST = int(os.environ.get("ELASTIC_RANKS", "1"))  # ranks of the launch
RANKS = int(os.environ.get("RANKS", MOST))  # so many must be there at the end
PER_EPOCH, EPOCHS, ROWS = (
    20,
    int(os.environ.get("EPOCHS", "4")),
    12,
)  # batches an epoch, epochs, and rows of a global batch
STEPS = PER_EPOCH * EPOCHS
POINTS = [STEPS * (number + 1) // (KILLS + 1) for number in range(KILLS)]  # the steps about which ranks are killed


def rows(step: int) -> tuple[Any, Any]:
    """Return this rank's part of the global batch of ``step``: numbers of words, and targets."""
    numbers = np.random.default_rng(step)
    words, targets = numbers.integers(0, 30, (ROWS, 4)), numbers.standard_normal((ROWS, 1))
    return words[ddl.rank() :: ddl.size()], targets[ddl.rank() :: ddl.size()]


def kill_at(step: int) -> None:
    """Kill one rank for each of POINTS, some milliseconds after it has begun that step."""
    for number, point in enumerate(POINTS):
        mark = FOLDER / f"{number}"
        if step >= point and ddl.size() == MOST and ddl.rank() == number % MOST and not mark.exists():
            mark.write_text(str(step))

            def kill() -> None:
                time.sleep(random.uniform(0, 0.03))
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=kill).start()


def batches(state: Any) -> Iterator[tuple[Any, Any]]:
    step = state.steps if ROLLBACK == "step" else state.epoch * PER_EPOCH + state.batch
    while True:
        kill_at(step)
        # A rank that was killed must come back before the end, also on a slow machine: importing takes it seconds.
        time.sleep(float(os.environ["PAUSE_S"]) if OUTSIDE else 0.02 if ddl.size() == MOST else 2.0)
        yield rows(step)
        step += 1


ddl.init()
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(1 + ddl.rank())
model = keras.Sequential(
    [
        keras.Input((4,), dtype="int64"),
        keras.layers.Embedding(30, 3),  # sparse gradients
        keras.layers.Flatten(),
        ddl.SyncBatchNormalization(momentum=0.9),
        keras.layers.Dense(5, activation="tanh"),
        keras.layers.Dense(1),
    ]
)
# Weight decay and iterations use no gradient: a graph could apply both although the reduction has failed.
adam = keras.optimizers.AdamW(0.01, weight_decay=0.1)
optimizer = adam if WAY == "tape" else ddl.DistributedOptimizer(adam)
if WAY == "fit":
    model.compile(optimizer=optimizer, loss="mse")
with np.load(sys.argv[5]) as start:
    model.set_weights([start[name] for name in start.files])
state = ddl.elastic.KerasState(model, optimizer, rollback=ROLLBACK, batch=0, epoch=0, log=[])
state.register_reset_callbacks([lambda before, after: print(f"from {before} to {after} ranks", flush=True)])


def step(words: Any, targets: Any) -> None:
    with tf.GradientTape() as plain:
        tape = DistributedGradientTape(plain) if WAY == "tape" else plain
        loss = tf.reduce_mean(tf.square(model(words, training=True) - targets))
    gradients = (tape if WAY == "tape" else plain).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


graph = step if WAY == "eager" else tf.function(step, reduce_retracing=True)


class LogSteps(keras.callbacks.Callback):  # type: ignore[misc, name-defined]  # Keras has no types
    """Keeps in the state which steps it contains, and the log with it: each sample of a step is in one rank's part."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state.log = [*state.log, int(optimizer.iterations) - 1]


def wait_for_the_end() -> None:
    """Wait before the last epoch until no more ranks are killed, and those that were are back."""
    until_s = time.monotonic() + float(os.environ["PATIENCE_S"])
    while time.monotonic() < until_s and not ((FOLDER / "enough").exists() and ddl.size() >= RANKS):
        time.sleep(0.02)
        state.check_host_updates()  # ranks are lost and join here, too


@ddl.elastic.run
def train(state: Any) -> None:
    print(f"rank {ddl.rank()} of {ddl.size()} begins at step {int(optimizer.iterations)}", flush=True)
    assert state.epoch * PER_EPOCH + state.batch == int(optimizer.iterations), (state.epoch, state.batch)
    if OUTSIDE:
        from tests.faults.marks import has_state  # the other process has the path to it

        has_state()
    if WAY == "fit":
        callbacks = [
            LogSteps(),
            ddl.elastic.CommitStateCallback(state),
            ddl.elastic.UpdateBatchStateCallback(state),
            ddl.elastic.UpdateEpochStateCallback(state),
        ]
        while state.epoch < EPOCHS:
            if OUTSIDE and state.epoch == EPOCHS - 1:
                wait_for_the_end()
            left = PER_EPOCH - state.batch
            source: Any = batches(state)
            if os.environ.get("TF_USE_LEGACY_KERAS"):  # it takes no shapes from a generator's first batch
                kinds = (tf.TensorSpec((None, 4), tf.int64), tf.TensorSpec((None, 1), tf.float64))
                source = tf.data.Dataset.from_generator(lambda: batches(state), output_signature=kinds)
            model.fit(source, steps_per_epoch=left, epochs=1, callbacks=callbacks, verbose=0)
        return
    for words, targets in batches(state):
        if int(optimizer.iterations) >= STEPS:
            return
        graph(tf.constant(words), tf.constant(targets))
        state.epoch, state.batch = divmod(int(optimizer.iterations), PER_EPOCH)
        state.commit()


train(state)
values = [float(value) for weight in model.get_weights() for value in weight.ravel()]
print("result", json.dumps({"rank": ddl.rank(), "size": ddl.size(), "values": values, "log": state.log}), flush=True)
