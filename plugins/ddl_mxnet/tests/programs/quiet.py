"""Trains ten steps on this rank's rows of each batch, and counts the messages of thirty more in replay."""

from __future__ import annotations

import json

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

ROWS = 8


def rows(step: int) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    random = np.random.RandomState(step)
    own = slice(ddl.rank() * ROWS // ddl.size(), (ddl.rank() + 1) * ROWS // ddl.size())
    return mx.nd.array(random.randn(ROWS, 1, 8, 8)[own]), mx.nd.array(random.randint(3, size=ROWS)[own])


def main() -> None:
    ddl.init()
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.Dense(16, activation="relu"), gluon.nn.Dense(3))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    ddl.broadcast_parameters(net.collect_params())
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(number: int) -> None:
        x, y = rows(number)
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))

    for number in range(10):
        step(number)
    # Only every 31st value, because the launcher may cut a line that is longer than a pipe's buffer.
    flat = [parameter.data().asnumpy().ravel() for parameter in net.collect_params().values()]
    values = [each[:: 1 if each.size < 512 else 31].tolist() for each in flat]
    for number in range(10, 30):
        step(number)
    before = ddl.stats()
    for number in range(30, 60):
        step(number)
    after = ddl.stats()
    step(60)  # no rank leaves replay before the other has counted
    counted = {key: after[key] - before[key] for key in ("control_messages", "buckets_replayed", "buckets_negotiated")}
    found = {"values": values, "last": net[2].bias.data().asnumpy().tolist(), **counted}
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
