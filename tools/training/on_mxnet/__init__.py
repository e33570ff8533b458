"""The trainings on MXNet's Gluon: alone, with a barrier a step, by ddl. There is none to hold ddl to: MXNet's own needs servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from tools.training.contenders import Trainings
from tools.training.meeting import Meeting
from tools.training.on_mxnet.models import WORKLOADS, Batch, Workload

__all__ = ["trainings"]

BATCHES = 4  # inputs that a rank takes in turn
OPTIONS = {"learning_rate": 1e-4, "momentum": 0.9}  # small: what is learned from noise must not diverge


class MxnetContender:
    """A model with its trainer, and how many steps it has taken. ``meet`` is called before each update."""

    def __init__(self, net: Any, trainer: Any, batches: list[Batch], meet: Callable[[], None] | None) -> None:
        self.net = net
        self._trainer = trainer
        self._batches = batches
        self._meet = meet
        self._taken = 0
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self._parameters = list(net.collect_params().values())

    def step(self) -> None:
        inputs, classes = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        with autograd.record():
            loss = self._loss(self.net(inputs), classes)
        loss.backward()
        if self._meet is not None:
            self._parameters[0].grad().wait_to_read()  # the last one; else the barrier would be in front of the step
            self._meet()
        self._trainer.step(len(inputs))

    def steps(self, count: int) -> float:
        """Seconds of one of ``count`` steps."""
        begun_s = time.perf_counter()
        for _ in range(count):
            self.step()
        mx.nd.waitall()
        return (time.perf_counter() - begun_s) / count

    def sum(self) -> float:
        """Of all parameters: the same on every rank if they are."""
        return sum(float(parameter.data().asnumpy().sum(dtype=np.float64)) for parameter in self._parameters)


def _contenders(workload: Workload, meet: Meeting) -> dict[str, MxnetContender]:
    """All of them from the same start on the same inputs of this rank."""
    random = np.random.RandomState(1 + meet.rank)
    batches = [workload.batch(workload.samples, random) for _ in range(BATCHES)]
    made = {}
    for name in ("none", "barrier", "ddl"):
        mx.random.seed(0)
        net = workload.make()
        parameters = net.collect_params()
        if name == "ddl":
            trainer = ddl.DistributedTrainer(parameters, "sgd", OPTIONS)
            ddl.broadcast_parameters(parameters, root_rank=0)
        else:
            trainer = gluon.Trainer(parameters, "sgd", OPTIONS, kvstore=None)
        made[name] = MxnetContender(net, trainer, batches, meet if name == "barrier" else None)
    return made


def _check_agreement(contenders: dict[str, MxnetContender], meet: Meeting) -> None:
    """RuntimeError unless ddl's ranks have come to the same parameters, and those that train alone to others."""
    together, alone = (meet.of_ranks(contenders[name].sum()) for name in ("ddl", "none"))
    if len(set(together)) != 1 or (meet.ranks > 1 and len(set(alone)) == 1):
        raise RuntimeError(f"ddl's ranks have trained apart: {together}; alone: {alone}")


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """All three in this rank, of whose job ddl is initialized; every rank calls it."""
    workload = WORKLOADS[model]
    contenders = _contenders(workload, meet)
    sizes = [int(np.prod(parameter.shape)) for parameter in contenders["none"].net.collect_params().values()]
    yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(contenders, meet))
    mx.nd.waitall()
