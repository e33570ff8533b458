"""Uses one trainer in three worlds, the second of one rank; then rank 1 is killed, and rank 0 prints its error."""

from __future__ import annotations

import os
import signal
import time

import ddl_mxnet as ddl
import mxnet as mx
from mxnet import autograd, gluon

from ddlcore.errors import PeerLost


def main() -> None:
    ddl.init()
    rank = ddl.rank()
    net = gluon.nn.Dense(4, in_units=4)
    net.initialize(mx.init.Constant(1.0))
    trainer = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})

    def step() -> None:
        with autograd.record():
            loss = (net(mx.nd.full((2, 4), rank + 1.0)) ** 2).mean()
        loss.backward()
        trainer.step(1)

    for _ in range(3):
        step()
    ddl.shutdown()
    ddl.init(comm=[rank])
    before, momentum = net.bias.data().asnumpy(), trainer._updaters[0].states[0].asnumpy()
    step()
    moved = net.bias.data().asnumpy() - before
    expected = 0.9 * momentum - 0.1 * net.bias.grad().asnumpy()
    print("alone", abs(moved - expected).max() < 1e-5, flush=True)
    ddl.shutdown()
    ddl.init()
    ddl.broadcast_parameters(net.collect_params())
    ddl.broadcast_parameters({str(i): state for i, state in trainer._updaters[0].states.items()})
    for _ in range(8):
        step()
    print("sum", net.weight.data().sum().asscalar(), flush=True)
    try:
        while True:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step()
    except PeerLost as lost:
        begun_s = time.monotonic()
        mx.nd.waitall()  # so that only ddl has work left
        print("lost", lost.ranks, f"{time.monotonic() - begun_s:.1f}", flush=True)


if __name__ == "__main__":
    main()
