"""The ranks' parameters are compared after steps of a trainer or of a Module's optimizer; planted faults are found."""

from __future__ import annotations

import logging
from itertools import count
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import pytest
from mxnet import autograd, gluon

from ddlcore.api import Job
from ddlcore.testing import run_world
from plugins.ddl_mxnet.tests.training import Network

pytestmark = pytest.mark.timeout(150)
PATIENT: dict[str, object] = {"leave_timeout_s": 30.0, "start_timeout_s": 30.0, "open_timeout_s": 30.0}


def train(rank: int, steps: int, flip: int = 0) -> Any:
    """Train for ``steps`` steps; 0: until an error is raised. One element changes on rank 1 before step ``flip``."""
    net = Network("float32")
    trainer = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for step in range(1, steps + 1) if steps else count(1):
        if step == flip and rank == 1:
            bias = net.left.bias.data()
            bias[1] = bias[1] + 1
        with autograd.record():
            loss = (net(mx.nd.ones((4, 6)) * (rank + 1)) ** 2).mean()
        loss.backward()
        trainer.step(4)
    ddl.verify(net)
    ddl.shutdown()
    return net


def test_a_changed_element_is_found() -> None:
    """Every rank raises an error that names the parameter, the ranks and the steps."""

    def rank(rank: int, job: Job) -> ddl.ReplicasDiffer:
        with pytest.raises(ddl.ReplicasDiffer) as info:
            train(rank, 0, flip=6)
        return info.value

    for error in run_world(3, rank, settings={"verify_every": 2, **PATIENT}, deadline_s=120):
        assert error.tensor.endswith("bias (float32 3)")
        assert (error.groups, error.step, error.agreed_step) == (((0, 2), (1,)), 6, 4)


def test_equal_parameters_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A correct training gives no warning; running statistics, which differ by design, are not compared."""

    def rank(rank: int, job: Job) -> None:
        train(rank, 6)

    with caplog.at_level(logging.WARNING, "ddl"):
        run_world(2, rank, settings={"verify_every": 1, **PATIENT}, deadline_s=120)
    assert "parameters differ" not in caplog.text


def test_a_modules_updates_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """One call with several indices is a step; weights that were not broadcast give a warning after the first."""

    def rank(rank: int, job: Job) -> None:
        optimizer = ddl.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))
        weights = [mx.nd.ones((2, 2)), mx.nd.ones(3) * rank]
        grads = [mx.nd.ones((2, 2)), mx.nd.ones(3)]
        optimizer.update([0, 1], weights, grads, [None, None])
        ddl.barrier()
        optimizer.update([0, 1], weights, grads, [None, None])

    with caplog.at_level(logging.WARNING, "ddl"):
        run_world(2, rank, settings=PATIENT, deadline_s=120)
    assert "the first tensor that differs is index 1 (float32 3)" in caplog.text


def test_verify_takes_what_holds_parameters() -> None:
    """``verify`` takes a block (without running statistics), its parameters, a dict or arrays.

    The error states how far the values are apart.
    """

    def rank(rank: int, job: Job) -> None:
        net = gluon.nn.Sequential()
        net.add(gluon.nn.Dense(3, in_units=2), gluon.nn.BatchNorm(in_channels=3))
        net.initialize(mx.init.One())
        net[1].running_mean.set_data(mx.nd.ones(3) * rank)
        ddl.verify(net)
        ddl.verify(net.collect_params())
        ddl.verify({"a": mx.nd.arange(4)})
        with pytest.raises(ddl.ReplicasDiffer) as info:
            ddl.verify([mx.nd.arange(4), mx.nd.ones(2) * rank])
        assert info.value.distances == {1: 1.0}
        with pytest.raises(ValueError, match="no parameter"):
            ddl.verify([7])

    run_world(2, rank, settings=PATIENT, deadline_s=120)
