"""The four trainings on TensorFlow: alone, with a barrier a step, by MultiWorkerMirroredStrategy, by ddl."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ddl_tf as ddl
import numpy as np
import tensorflow as tf

from ddlcore.control.ports import free_ports
from tools.training.contenders import Contender, Trainings
from tools.training.meeting import Meeting
from tools.training.on_tf.companion import Companion
from tools.training.on_tf.models import WORKLOADS, Workload
from tools.training.on_tf.training import TfContender, mean_loss, optimizer_for

__all__ = ["trainings"]


def _contender(workload: Workload, name: str, meet: Meeting) -> TfContender:
    """One of those that train in this process."""
    model = workload.make()
    optimizer = optimizer_for(model)

    def step(inputs: Any, classes: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(model, inputs, classes)
        if name == "ddl":
            tape = ddl.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return TfContender(workload, meet.rank, model, step, meet if name == "barrier" else None)


def _check_agreement(ours: TfContender, theirs: Companion) -> None:
    """RuntimeError unless both, after as many steps, have come to the same parameters."""
    for one, other in zip(ours.parameters(), theirs.parameters()):
        if not np.allclose(one, other, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"ddl and MultiWorkerMirroredStrategy have trained apart, by {abs(one - other).max():g}")


def _ports(meet: Meeting) -> list[int]:
    """A free port for each rank, known to all; every rank calls it."""
    while True:
        ports = [round(port) for port in meet.of_ranks(free_ports(1)[0])]
        if len(set(ports)) == len(ports):
            return ports


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """All four of this rank, of whose job ddl is initialized; every rank calls it."""
    workload = WORKLOADS[model]
    peer = Companion(model, meet.rank, _ports(meet))
    try:
        own = {name: _contender(workload, name, meet) for name in ("none", "barrier", "ddl")}
        sizes = [int(np.prod(variable.shape)) for variable in own["none"].model.trainable_variables]
        contenders: dict[str, Contender] = {
            "none": own["none"],
            "barrier": own["barrier"],
            "mwms": peer,
            "ddl": own["ddl"],
        }
        yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(own["ddl"], peer))
        meet()
    finally:
        peer.close()
