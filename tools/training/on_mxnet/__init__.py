"""The trainings on MXNet's Gluon: alone, with a barrier in each step, with an allreduce's memory passes, with ddl.

There is no peer to compare ddl with, because MXNet's own way needs servers.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import _LIB, check_call

from tools.training.contenders import Trainings
from tools.training.frameworks import FRAMEWORKS, PASSES
from tools.training.meeting import Meeting
from tools.training.on_mxnet.models import WORKLOADS, Batch, Workload
from tools.training.passes import Passes

__all__ = ["trainings"]

BATCHES = 4  # different inputs of a rank, used in turn
OPTIONS = {"learning_rate": 1e-4, "momentum": 0.9}  # small: training on noise must not diverge


class MxnetContender:
    """A model with its trainer, and how many steps it has taken. ``between`` is called before each update."""

    def __init__(self, net: Any, trainer: Any, batches: list[Batch]) -> None:
        self.net = net
        self._trainer = trainer
        self._batches = batches
        self._taken = 0
        self.between: Callable[[], None] | None = None
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self._parameters = list(net.collect_params().values())

    def gradients(self) -> list[Any]:
        """Return the gradients as flat numpy arrays of the same memory."""
        return [_memory(parameter.grad()) for parameter in self._parameters]

    def step(self) -> None:
        inputs, classes = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        with autograd.record():
            loss = self._loss(self.net(inputs), classes)
        loss.backward()
        if self.between is not None:
            self._parameters[0].grad().wait_to_read()  # the last one, so that the barrier comes after the backward pass
            self.between()
        self._trainer.step(len(inputs))

    def steps(self, count: int) -> float:
        """Take ``count`` steps, and return the seconds of one."""
        begun_s = time.perf_counter()
        for _ in range(count):
            self.step()
        mx.nd.waitall()
        return (time.perf_counter() - begun_s) / count

    def sum(self) -> float:
        """Return the sum of all parameters, which is equal on all ranks if the parameters are."""
        return sum(float(parameter.data().asnumpy().sum(dtype=np.float64)) for parameter in self._parameters)


def _memory(array: Any) -> Any:
    """Return the array's own memory; the array must outlive it."""
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return np.frombuffer((ctypes.c_float * array.size).from_address(address.value or 0), np.float32)


def _contenders(workload: Workload, meet: Meeting) -> dict[str, MxnetContender]:
    """Return all contenders, with equal weights and the same inputs of this rank."""
    random = np.random.RandomState(1 + meet.rank)
    batches = [workload.batch(workload.samples, random) for _ in range(BATCHES)]
    made = {}
    for name in FRAMEWORKS["mxnet"].contenders:
        mx.random.seed(0)
        net = workload.make()
        parameters = net.collect_params()
        if name == "ddl":
            trainer = ddl.DistributedTrainer(parameters, "sgd", OPTIONS)
            ddl.broadcast_parameters(parameters, root_rank=0)
        else:
            trainer = gluon.Trainer(parameters, "sgd", OPTIONS, kvstore=None)
        made[name] = MxnetContender(net, trainer, batches)
    made["barrier"].between = meet
    made[PASSES].between = partial(_pass, Passes(meet), made[PASSES])
    return made


def _pass(passes: Passes, contender: MxnetContender) -> None:
    passes(contender.gradients())


def _check_agreement(contenders: dict[str, MxnetContender], meet: Meeting) -> None:
    """Raise RuntimeError unless ddl's ranks have equal parameters, and ranks that train alone have different ones."""
    together, alone = (meet.of_ranks(contenders[name].sum()) for name in ("ddl", "none"))
    if len(set(together)) != 1 or (meet.ranks > 1 and len(set(alone)) == 1):
        raise RuntimeError(f"ddl's ranks have trained apart: {together}; alone: {alone}")


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """Yield all four contenders of this rank. Every rank calls this, after initializing ddl."""
    workload = WORKLOADS[model]
    contenders = _contenders(workload, meet)
    sizes = [int(np.prod(parameter.shape)) for parameter in contenders["none"].net.collect_params().values()]
    yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(contenders, meet))
    mx.nd.waitall()
