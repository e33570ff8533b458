"""The training benchmark's side of MXNet: its models are torch's, and a report does without a peer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tools.training.contenders import Measured
from tools.training.report import ratio_rows


@pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="MXNet is not installed")
@pytest.mark.parametrize(("name", "tensors", "parameters"), [("wide", 8, 33_573_898), ("deep", 402, 832_650)])
def test_models_are_what_the_targets_were_set_for(name: str, tensors: int, parameters: int) -> None:
    """As many tensors and parameters as torch's, and the same batch; every parameter gets a gradient that is not all 0."""
    import ddl_mxnet  # noqa: F401  # MXNet needs it in front
    import mxnet as mx
    import numpy as np

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
