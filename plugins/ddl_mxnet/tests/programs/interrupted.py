"""One rank of two: on rank 0 a signal's handler raises within a step while rank 1 is late.

Arguments: trainer or optimizer, a folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd

DEADLINE_S = 60.0
HIT = Path(sys.argv[2]) / "hit"


class Interrupted(Exception):
    """The exception that the handler raises."""


def handle(*_: Any) -> None:
    HIT.touch()
    raise Interrupted


def until(true: Any) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end_s, "nothing came of it"
        time.sleep(0.005)


def signal_when_sent(reducer: Any) -> None:
    """Send the signal when gradients have been sent.

    The other rank comes only after the handler has run, so the gradients are still in flight.
    """
    until(lambda: reducer.torn and any(one.pending for one in reducer._in_flight))
    os.kill(os.getpid(), signal.SIGUSR1)


class Training:
    """One weight that steps by ``-1 * gradient``, with Gluon's Trainer or with an optimizer called as a Module does."""

    def __init__(self, kind: str) -> None:
        self.weight = mx.gluon.Parameter("weight", shape=(1000,))
        self.weight.initialize(mx.init.Zero())
        if kind == "trainer":
            self.trainer: Any = ddl.DistributedTrainer([self.weight], "sgd", {"learning_rate": 1.0})
            self.reducer = self.trainer._ddl
            self.step: Callable[[], Any] = partial(self.trainer.step, 1)
        else:
            optimizer: Any = ddl.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
            self.reducer = optimizer._ddl
            self.step = partial(optimizer.update, [0], [self.weight.data()], [self.weight.grad()], [None])

    def backward(self, factor: float) -> None:
        with autograd.record():
            loss = (self.weight.data() * factor).sum()
        loss.backward()

    def check(self, expected: float) -> None:
        np.testing.assert_array_equal(self.weight.data().asnumpy(), np.full(1000, expected))


def main(kind: str) -> None:
    ddl.init()
    rank = ddl.rank()
    training = Training(kind)
    for number in range(1, 4):
        training.backward(rank + 1.0)
        training.step()
        training.check(-1.5 * number)
    training.backward(rank + 1.0)
    if rank:
        until(HIT.exists)
        training.step()
        training.check(-6.0)  # the gradients that rank 0 had sent, although it has computed others since
        training.backward(2.0)
        try:
            training.step()
        except ddl.DdlInternalError as error:
            print(f"told: {error}", flush=True)
        return
    signal.signal(signal.SIGUSR1, handle)
    threading.Thread(target=signal_when_sent, args=(training.reducer,), daemon=True).start()
    try:
        training.step()
        raise AssertionError("nothing was raised")
    except Interrupted:
        pass
    training.backward(100.0)  # writes memory that is in flight, so MXNet must wait
    training.weight.grad().wait_to_read()
    try:
        training.step()
    except ddl.DdlInternalError as error:
        print(f"told: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
