"""Runs every collective, a backward pass and a trainer in a world of one, under MXNet's naive engine."""

from __future__ import annotations

import sys
from typing import Any

unwanted: Any = dict.fromkeys(("matplotlib", "onnx", "pandas", "scipy", "sklearn"))
sys.modules.update(unwanted)  # MXNet imports them if it can, which takes longer than all the rest

import ddl_mxnet as ddl  # noqa: E402
import mxnet as mx  # noqa: E402
from ddl_mxnet.engine import is_naive  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402


def main() -> None:
    assert is_naive()
    ddl.init()
    array = mx.nd.array([[2.0], [3.0]])
    for _ in range(12):  # long enough to be replayed
        for result in (
            ddl.allreduce(array, name="new"),
            ddl.synchronize(ddl.allreduce_async(array, name="handle")),
            ddl.allreduce_(array.copy(), name="place", op=ddl.Sum),
            ddl.grouped_allreduce_([array.copy(), array.copy()], name="group")[1],
            ddl.broadcast(array, 0, name="sent"),
            ddl.allgather(array, name="rows"),
            ddl.alltoall(array, splits=[2], name="pieces")[0],
            ddl.reducescatter(array, name="part", op=ddl.Sum),
        ):
            assert result.asnumpy().tolist() == [[2.0], [3.0]], result
        array.attach_grad()
        with autograd.record():
            loss = (ddl.allreduce(array, name="x", op=ddl.Sum) * 5).sum()
        loss.backward()
        assert array.grad.asnumpy().tolist() == [[5.0], [5.0]]
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(1.0))
    trainer = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    for _ in range(3):
        with autograd.record():
            loss = net(mx.nd.ones((1, 1))).sum()
        loss.backward()
        trainer.step(1)
    assert net.weight.data().asscalar() == 1.0 - 3 * 0.5
    ddl.allreduce_(array, name="last")
    print("done")


main()
