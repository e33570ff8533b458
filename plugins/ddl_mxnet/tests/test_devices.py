"""Tests which device belongs to a rank, as MXNet numbers devices, and collectives on arrays of a GPU."""

from __future__ import annotations

import logging
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from ddl_mxnet import devices

from ddlcore.api import gpus
from ddlcore.testing import World, run_world
from plugins.ddl_mxnet.tests.training import STEPS, Part, agree

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, [mx.cpu(), mx.cpu()]), (1, [mx.gpu(0)] * 2), (2, [mx.gpu(0), mx.gpu(1)])]
)
def test_local_device(monkeypatch: pytest.MonkeyPatch, count: int, expected: list[mx.Context]) -> None:
    """Only the GPUs that MXNet sees count."""
    monkeypatch.setattr(mx.context, "num_gpus", lambda: count)
    with World(2) as world:
        assert world.run(lambda rank, job: ddl.local_device()) == expected


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> mx.Context:
    """Return a device that ddl takes for a GPU; MXNet's engine copies to and from it as with a GPU."""
    place = mx.cpu(1)
    monkeypatch.setattr(devices, "_is_gpu", lambda context: context == place)
    return place


def test_verbs_on_a_gpu(elsewhere: mx.Context, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays are staged on the host, with a line in the log, and results are on the device of the input."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.full((2, 3), rank + 1.0, ctx=elsewhere)
        found = [
            (ddl.allreduce(array, op=ddl.Sum), np.full((2, 3), 3.0)),
            (ddl.synchronize(ddl.allreduce_async(array * 2, op=ddl.Sum)), np.full((2, 3), 6.0)),
            (ddl.broadcast(array, 1), np.full((2, 3), 2.0)),
            (ddl.allgather(array), np.repeat([1.0, 2.0], 6).reshape(4, 3)),
            (ddl.alltoall(array), np.repeat([1.0, 2.0], 3).reshape(2, 3)),
            (ddl.reducescatter(array, op=ddl.Sum), np.full((1, 3), 3.0)),
            (ddl.grouped_allreduce([array, array + 1], op=ddl.Sum)[1], np.full((2, 3), 5.0)),
        ]
        for result, expected in found:
            assert result.ctx == elsewhere
            assert result.asnumpy().tolist() == expected.tolist()
        ddl.allreduce_(array, op=ddl.Sum)
        array *= 2  # MXNet's engine waits for the copy back
        assert array.asnumpy().tolist() == np.full((2, 3), 6.0).tolist()

    gpus._log.cache_clear()
    with caplog.at_level(logging.INFO, "ddl"):
        run_world(2, play, settings={"log_level": "INFO"})
    assert [text for text in caplog.messages if "are staged on the host" in text] == [
        "arrays on a GPU are staged on the host: MXNet shows nobody the streams that it computes on"
    ]


def test_an_error_reaches_who_reads(elsewhere: mx.Context) -> None:
    """If the ranks disagree, reading the array on the GPU raises the error."""

    def play(rank: int, job: Any) -> None:
        result = ddl.allreduce(mx.nd.ones((2 + rank,), ctx=elsewhere), name="x")
        with pytest.raises(ddl.DdlInternalError, match="the ranks disagree"):
            result.asnumpy()

    run_world(2, play)


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}], ids=["plain", "groups"])
def test_training_on_a_gpu(elsewhere: mx.Context, options: dict[str, Any]) -> None:
    """Training on a GPU gives the same parameters as one process."""

    def train(part: Part) -> None:
        with elsewhere:
            part.net.collect_params().reset_ctx(elsewhere)
            trainer = part.trainer(**options)
            for step in range(STEPS):
                trainer.step(part.backward(step))
            if part.size > 1:
                ddl.broadcast_parameters(part.net.collect_params())

    agree(train)
