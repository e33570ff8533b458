"""The setting ``compression`` applies in every step to gradients without their own compression, and not to metrics."""

from __future__ import annotations

from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.process.job import Job
from ddlcore.testing import World


@pytest.mark.parametrize(
    ("options", "compressed"),
    [
        ({}, True),
        ({"groups": 1}, True),
        ({"compression": ddl.Compression.none}, False),
        ({"compression": "none"}, False),
    ],
    ids=["by the setting", "groups", "none", "none by name"],
)
def test_gradients_alone(options: dict[str, Any], compressed: bool) -> None:
    def play(rank: int, job: Job) -> None:
        reducer = Reducer(Reduction(op=ddl.Sum, **options), "setting")
        variables = [tf.Variable(tf.zeros(40)), tf.Variable(tf.zeros(3))]
        third = np.float32(1 / 3)
        expected = 2 * (np.float32(np.float16(third)) if compressed else third)
        for step in range(8):
            for gradient in reducer.reduce([tf.fill(40, third), tf.fill(3, third)], variables):
                assert (gradient.numpy() == expected).all(), step
            assert float(ddl.allreduce(tf.constant(7e4), name="loss", op=ddl.Sum)) == 1.4e5, step

    with World(2, settings={"compression": "fp16"}) as world:
        world.run(play)


def test_who_gave_none() -> None:
    """Tapes and optimizers leave the compression open if the user gives none."""

    def play(rank: int, job: Job) -> None:
        assert ddl.DistributedGradientTape(tf.GradientTape())._reduction.compression is None
        none = ddl.Compression.none
        assert ddl.DistributedGradientTape(tf.GradientTape(), compression=none)._reduction.compression is none

    with World(2) as world:
        world.run(play)
