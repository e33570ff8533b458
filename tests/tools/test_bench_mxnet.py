"""The training benchmark's side of MXNet: its models are torch's, and a report does without a peer."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.tiers import long
from tools.training.contenders import Measured
from tools.training.meeting import Meeting, room
from tools.training.passes import CHUNK_BYTES, CHUNKS, Passes
from tools.training.report import missed, ratio_rows


@pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="MXNet is not installed")
@pytest.mark.parametrize(("name", "tensors", "parameters"), [*long(("wide", 8, 33_573_898)), ("deep", 402, 832_650)])
def test_models_are_what_the_targets_were_set_for(name: str, tensors: int, parameters: int) -> None:
    """As many tensors and parameters as torch's, and the same batch; every parameter gets a gradient that is not all 0."""
    import ddl_mxnet  # noqa: F401  # MXNet needs it in front
    import mxnet as mx

    from tools.training.on_mxnet.models import WORKLOADS
    from tools.training.on_torch.models import WORKLOADS as TORCH_WORKLOADS

    workload = WORKLOADS[name]
    assert workload.samples == TORCH_WORKLOADS[name].samples
    net = workload.make()
    mine: list[Any] = list(net.collect_params().values())
    assert (len(mine), sum(int(np.prod(one.shape)) for one in mine)) == (tensors, parameters)
    inputs, classes = workload.batch(2, np.random.RandomState(0))
    with mx.autograd.record():
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(inputs), classes)
    loss.backward()
    assert all(bool(one.grad().asnumpy().any()) for one in mine)


def test_a_report_without_a_peer() -> None:
    """Ratios to training alone and to a barrier, and messages, which must be none."""
    seconds = {"none": [1.0, 1.0, 1.0], "barrier": [1.1, 1.1, 1.1], "ddl": [1.3, 1.3, 1.3]}
    run = Measured("wide", 2, 8, 10, 2, 1, seconds, 0.5, 1.0, 0, "mxnet")
    verdicts = {row.over: row.verdict for row in ratio_rows(run)}
    assert verdicts == {
        "ddl / none": "holds",
        "ddl / barrier": "",
        "barrier / none": "",
        "ddl's control messages": "misses",
    }


@pytest.mark.parametrize(("passes", "expected"), [(1.27, "misses"), (1.29, "misses, at its bound")])
def test_a_miss_is_nobodys_where_memory_alone_takes_most_of_what_the_target_allows(
    passes: float, expected: str
) -> None:
    """Of the 0.4 that the target leaves for all communication, a floor of more than 0.28 leaves too little."""
    seconds = {"none": [1.0] * 3, "barrier": [1.1] * 3, "passes": [passes] * 3, "ddl": [1.5] * 3}
    rows = ratio_rows(Measured("wide", 2, 8, 10, 2, 1, seconds, 0.0, 1.0, 0, "mxnet"))
    verdicts = {row.over: row.verdict for row in rows}
    assert verdicts["ddl / none"] == expected and verdicts["passes / none"] == ""
    assert missed(rows) is (expected == "misses")


def test_the_floor_moves_all_of_both_ranks() -> None:
    """Each rank's slots hold the last of its own arrays; what the other's hold is added to every element."""
    count = CHUNK_BYTES // 4
    whole = count * CHUNKS
    with room(2) as place:
        meetings = [Meeting(rank, 2, place) for rank in range(2)]
        first = [np.full(whole + 7, 2.0, np.float32), np.ones(3, np.float32)]
        Passes(meetings[0])(first)
        second = [np.full(whole, 5.0, np.float32)]
        Passes(meetings[1])(second)
    assert [set(array) for array in first] == [{2.0}, {1.0}]  # the other had come with nothing yet
    assert set(np.frombuffer(meetings[1].slots(1), np.float32)) == {5.0}
    shown = np.full(whole, 2.0, np.float32)
    shown[count : count + 3] = 1.0  # the small array had the next slot
    np.testing.assert_array_equal(second[0], shown + 5.0)
