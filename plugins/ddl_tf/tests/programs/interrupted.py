"""One rank of two: a signal's handler raises on rank 0 within a step, while rank 1 is late; then both ranks continue.

Argument: a folder. Prints a line for each way of training whose result was the same as without an interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras as ddl_keras
import keras
import numpy as np
import tensorflow as tf
from ddl_tf.exchange import Exchange

DEADLINE_S = 60.0
hits = 0
waiting = threading.Event()
file = Path(sys.argv[1])


class Interrupted(Exception):
    """The exception that the signal's handler raises."""


def handle(*_: Any) -> None:
    (file / str(hits)).touch()
    raise Interrupted


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end_s, "nothing came of it"
        time.sleep(0.005)


def take(exchange: Exchange, bare: Any = Exchange.take) -> Any:
    """Signal that everything has been sent, and take the results.

    The other rank starts its step only after the signal.
    """
    waiting.set()
    return bare(exchange)


def interrupted(step: Callable[[], Any], again: Callable[[], Any]) -> None:
    """Make one step in which rank 0 is interrupted and then calls ``again``.

    The other rank is late and notices nothing.
    """
    global hits
    hits += 1
    if ddl.rank():
        until((file / str(hits)).exists)
        step()
        return

    def send() -> None:
        assert waiting.wait(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    waiting.clear()
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        step()
        raise AssertionError("nothing was raised")
    except Interrupted:
        again()
    thread.join(DEADLINE_S)


def same(variable: Any, steps: int, label: str) -> None:
    np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, -1.5 * steps))
    print("held", label, flush=True)


def by_tape() -> None:
    """Check that a second call, with another batch, finishes the interrupted reduction: all ranks apply the same."""
    weight, table = tf.Variable(tf.zeros((300,))), tf.Variable(tf.zeros((4, 2)))

    def step(factor: float = ddl.rank() + 1.0) -> None:
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = factor * (tf.reduce_sum(weight) + tf.reduce_sum(tf.gather(table, [0, 1, 2, 3])))
        gradients = tape.gradient(loss, [weight, table])
        weight.assign_sub(gradients[0])
        table.scatter_sub(gradients[1])

    step()
    interrupted(step, lambda: step(100.0))
    step()
    same(weight, 3, "tape")
    same(table, 3, "tape, sparse")


def by_keras() -> None:
    """Check that calling the optimizer again with the same gradients finishes the interrupted step."""
    weight = keras.Variable(np.zeros(300, np.float32))
    optimizer = ddl_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    pairs = [(tf.fill((300,), ddl.rank() + 1.0), weight)]

    def step() -> None:
        optimizer.apply_gradients(pairs)

    step()
    interrupted(step, step)
    step()
    same(weight, 3, "keras")


def by_function() -> None:
    """Check that a handler runs only after TensorFlow has finished the function: that step is complete."""
    weight = tf.Variable(tf.zeros((300,)))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(factor: Any) -> None:
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = factor * tf.reduce_sum(weight)
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    own = tf.constant(ddl.rank() + 1.0)
    step(own)
    interrupted_in_graph(lambda: step(own))
    step(own)
    same(weight, 3, "function")


def by_session() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.Variable(tf.zeros((300,)), use_resource=True)
        optimizer = ddl.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize((ddl.rank() + 1.0) * tf.reduce_sum(weight))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        interrupted_in_graph(lambda: session.run(train))
        session.run(train)
        value = session.run(weight)
    np.testing.assert_array_equal(value, np.full(300, -4.5))
    print("held session", flush=True)


def interrupted_in_graph(step: Callable[[], Any]) -> None:
    """Do the same as ``interrupted`` for graphs, where the handler has to wait for the end of the step.

    So a thread, instead of the handler, tells the late rank that the signal has been sent.
    """
    global hits
    hits += 1
    if ddl.rank():
        until((file / str(hits)).exists)
        step()
        return

    def send() -> None:
        assert waiting.wait(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGUSR1)
        (file / str(hits)).touch()

    waiting.clear()
    threading.Thread(target=send, daemon=True).start()
    try:
        step()
        raise AssertionError("nothing was raised")
    except Interrupted:
        pass


def torn() -> None:
    """Check that an interrupt between a reduction and its update makes the next step fail on every rank."""
    weight = keras.Variable(np.zeros(300, np.float32))
    optimizer = ddl_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    pairs = [(tf.fill((300,), ddl.rank() + 1.0), weight)]
    optimizer.apply_gradients(pairs)
    if ddl.rank() == 0:
        bare = optimizer.update_step

        def raising(*_: Any) -> None:
            raise Interrupted

        optimizer.update_step = raising
        try:
            optimizer.apply_gradients(pairs)
            raise AssertionError("nothing was raised")
        except Interrupted:
            optimizer.update_step = bare
    else:
        optimizer.apply_gradients(pairs)
    try:
        optimizer.apply_gradients(pairs)
    except ddl.DdlInternalError as error:
        print(f"told: {error}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, handle)
    Exchange.take = take  # type: ignore[method-assign]  # to know when everything has been sent
    ddl.init()
    by_tape()
    by_keras()
    by_function()
    by_session()
    torn()
