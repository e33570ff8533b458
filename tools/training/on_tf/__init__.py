"""The four trainings on TensorFlow: alone, with a barrier in each step, with MultiWorkerMirroredStrategy, with ddl."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ddl_tf as ddl
import numpy as np
import tensorflow as tf

from ddlcore.control.ports import free_ports
from tools.training.contenders import Contender, Trainings
from tools.training.meeting import Meeting
from tools.training.on_tf.companion import Companion
from tools.training.on_tf.models import WORKLOADS, Workload
from tools.training.on_tf.training import Momentum, TfContender, mean_loss

__all__ = ["trainings"]


def _contender(workload: Workload, rank: int, wrapped: Callable[[Any], Any]) -> TfContender:
    """Return a contender that trains in this process, with ``wrapped`` around its tapes."""
    model = workload.make()
    momentum = Momentum(model)

    def step(inputs: Any, classes: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(model, inputs, classes)
        momentum.apply(wrapped(tape).gradient(loss, momentum.variables))
        return loss

    return TfContender(workload, rank, momentum.variables, step, None)


def _check_agreement(ours: TfContender, theirs: Companion) -> None:
    """Raise RuntimeError unless both have the same parameters after as many steps."""
    for one, other in zip(ours.parameters(), theirs.parameters()):
        if not np.allclose(one, other, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"ddl and MultiWorkerMirroredStrategy have trained apart, by {abs(one - other).max():g}")


def _ports(meet: Meeting) -> list[int]:
    """Return a free port for each rank, the same list on all ranks. Every rank calls this."""
    while True:
        ports = [round(port) for port in meet.of_ranks(free_ports(1)[0])]
        if len(set(ports)) == len(ports):
            return ports


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """Yield all four contenders of this rank. Every rank calls this, after initializing ddl."""
    workload = WORKLOADS[model]
    peer = Companion(model, meet.rank, _ports(meet))
    try:
        alone = _contender(workload, meet.rank, lambda tape: tape)
        ours = _contender(workload, meet.rank, ddl.DistributedGradientTape)
        sizes = [int(np.prod(variable.shape)) for variable in alone.variables]
        contenders: dict[str, Contender] = {
            "none": alone,
            "barrier": alone.meeting(meet),
            "mwms": peer,
            "ddl": ours,
        }
        yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(ours, peer))
        meet()
    finally:
        peer.close()
