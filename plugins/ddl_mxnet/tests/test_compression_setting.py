"""The setting ``compression`` applies to gradients without a compression of their own, and never to metrics."""

from __future__ import annotations

from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("options", "compressed"),
    [({}, True), ({"num_groups": 1}, True), ({"compression": ddl.Compression.none}, False)],
    ids=["by the setting", "groups", "none"],
)
def test_gradients_of_a_trainer(options: dict[str, Any], compressed: bool) -> None:
    """The sum of the gradients is that of float16 values, or exact."""

    def play(rank: int, job: Job) -> None:
        weight = gluon.Parameter("w", shape=(40,))
        weight.initialize(mx.init.Zero())
        trainer = ddl.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0}, **options)
        third = np.float32(1 / 3)
        expected = 2 * (np.float32(np.float16(third)) if compressed else third)
        for step in range(8):
            with autograd.record():
                loss = (weight.data() * float(third)).sum()
            loss.backward()
            trainer.allreduce_grads()
            assert (weight.grad().asnumpy() == expected).all(), step
            metric = ddl.allreduce(mx.nd.array([7e4]), average=False, name="loss")
            assert metric.asscalar() == 1.4e5, step

    with World(2, settings={"compression": "fp16"}) as world:
        world.run(play)


def test_gradients_of_a_module() -> None:
    """DistributedOptimizer has no argument for compression, so the setting decides."""

    def play(rank: int, job: Job) -> None:
        optimizer = ddl.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0))
        third = np.float32(1 / 3)
        for _ in range(6):
            weight, gradient = mx.nd.zeros(40), mx.nd.full(40, float(third))
            optimizer.update(0, weight, gradient, None)
            assert (gradient.asnumpy() == 2 * np.float32(np.float16(third))).all()

    with World(2, settings={"compression": "fp16"}) as world:
        world.run(play)
