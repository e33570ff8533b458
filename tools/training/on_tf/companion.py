"""A process beside a rank that trains with MultiWorkerMirroredStrategy whenever the rank tells it to.

It is a process of its own because TensorFlow's eager context joins its cluster permanently, and runs everything else
differently from then on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Companion"]

PATIENCE_S = 90.0  # to import TensorFlow, make a model and trace its step, while other processes do the same


class Companion:
    """The rank's side: a contender whose steps run in another process. ``ports``: a port of this host for each rank.

    Raises RuntimeError if the process ends, or does not answer for 90 s.
    """

    def __init__(self, model: str, rank: int, ports: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, rank, list(ports)), daemon=True)
        self._process.start()
        theirs.close()

    def steps(self, count: int) -> float:
        """Take ``count`` steps, and return the seconds of one."""
        return float(self._asked(count))

    def parameters(self) -> list[npt.NDArray[np.float32]]:
        """Return the current parameters."""
        return list(self._asked(0))

    def close(self) -> None:
        """End the process. Every rank calls this when no step is in progress."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _asked(self, request: int) -> Any:
        try:
            self._pipe.send(request)
            if self._pipe.poll(PATIENCE_S):
                return self._pipe.recv()
            reason = f"has not answered for {PATIENCE_S:g} s"
        except (EOFError, OSError):
            self._process.join(5.0)
            reason = f"has ended with {self._process.exitcode}"
        raise RuntimeError(f"the process of MultiWorkerMirroredStrategy {reason}")


def _serve(pipe: connection.Connection, model: str, rank: int, ports: list[int]) -> None:
    """Answer requests until the rank is gone: a number of steps by the seconds of one, and 0 by the parameters."""
    _end_with_parent()
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    contender = _contender(model, rank)
    while True:
        request = pipe.recv()
        pipe.send(contender.steps(request) if request else contender.parameters())


def _end_with_parent() -> None:
    """End this process with its parent, even during a step whose other processes may be gone, too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _contender(name: str, rank: int) -> Any:
    """Return the contender. The strategy is made first, because it must configure the context before anything runs."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    from tools.training.on_tf.models import WORKLOADS
    from tools.training.on_tf.training import Momentum, TfContender, mean_loss

    workload = WORKLOADS[name]
    with strategy.scope():
        model = workload.make()
        momentum = Momentum(model)

    def step_of_replica(inputs: Any, classes: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(model, inputs, classes)
        gradients = tape.gradient(loss, momentum.variables)
        momentum.apply(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients))
        return loss

    def step(inputs: Any, classes: Any) -> Any:
        return strategy.run(step_of_replica, (inputs, classes))

    return TfContender(workload, rank, momentum.variables, step, None)
