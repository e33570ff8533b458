"""Trains in float64, and kills one rank in the middle of a step; prints parameters and running statistics.

Arguments: a file that marks that the rank was killed, and how many steps, with how many ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from ddl_mxnet import elastic


class Momentum(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
    """Gradient descent with momentum in float64: that of MXNet rounds ``rescale_grad``, here 1 / ranks, to float32."""

    def create_state(self, index: int, weight: Any) -> Any:
        return mx.nd.zeros_like(weight)

    def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        state *= 0.9
        state -= grad * (self.rescale_grad * self._get_lr(index))
        weight += state


KILLED, STEPS, RANKS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ddl.init()
np.random.seed(0)
mx.random.seed(0)
net = mx.gluon.nn.Sequential()
net.add(mx.gluon.nn.Dense(16, in_units=8, dtype="float64"), mx.gluon.nn.BatchNorm(in_channels=16))
net.add(mx.gluon.nn.Dense(1, in_units=16, dtype="float64"))
net.cast("float64")
net.initialize()
schedule = mx.lr_scheduler.FactorScheduler(10, 0.9)
optimizer = Momentum(learning_rate=0.01, lr_scheduler=schedule)
trainer = ddl.DistributedTrainer(net.collect_params(), optimizer)
state: Any = elastic.MXNetState(net, trainer, done=0)


@elastic.run
def train(state: Any) -> None:
    print(f"begins at step {state.steps}", flush=True)
    while state.steps < STEPS:
        # Every rank has the same samples, so the result does not depend on how many ranks there are at a step.
        generator = np.random.default_rng(state.steps)
        x = mx.nd.array(generator.standard_normal((12, 8)), dtype="float64")
        with mx.autograd.record():
            loss = ((net(x) - x.sum(axis=1, keepdims=True)) ** 2).mean()
        loss.backward()
        if state.steps == STEPS // 2 and ddl.rank() == 1 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(1)
        state.done += 1
        state.commit()
        if ddl.size() < RANKS:
            time.sleep(2.0)  # so that the killed rank is back before the end, also on a slow machine


train(state)
values = np.concatenate([param.data().asnumpy().ravel() for param in net.collect_params().values()])
print(f"result {values.tobytes().hex()} {trainer._optimizer.num_update} {state.done} {trainer.learning_rate!r}")
