"""Trains by elastic.run; the rank and step that the environment names are killed, once. Prints the parameters' sum."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ddl_torch as ddl
import torch
from ddl_torch import elastic

from plugins.ddl_torch.tests.elastic_training import STEPS, batch, network

ddl.init()
mark = Path(os.environ["KILL_MARK"])  # exists when the rank was killed
rank, step = map(int, os.environ["KILL"].split(":"))
torch.manual_seed(100 + ddl.rank())  # the ranks begin with different models; the state makes them equal
model = network()
optimizer = ddl.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
model.load_state_dict(network().state_dict() if ddl.rank() else network(seed=1).state_dict())
state = elastic.TorchState(model, optimizer, scheduler=scheduler, marked=0)
sizes: list[int] = []


@elastic.run
def train(state: elastic.TorchState) -> None:
    sizes.append(ddl.size())
    print(f"begins at {state.steps} of {STEPS} on {ddl.size()}", flush=True)
    while state.steps < STEPS:
        images, target = batch(state.steps)
        state.optimizer.zero_grad()
        loss = (state.model(images) - target).square().mean()
        loss.backward()
        if state.steps == step and ddl.rank() == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.step()
        state.scheduler.step()
        state.marked = state.steps
        state.commit()
        until_s = time.monotonic() + 60.0
        while state.steps == STEPS - 20 and ddl.size() < 3 and time.monotonic() < until_s:
            time.sleep(0.02)
            state.commit()  # the killed rank is to join before the end


train(state)
values = ",".join(f"{value.double().sum().item():.17g}" for value in model.state_dict().values())
print(f"result {state.steps} {state.marked} {ddl.size()} {values}", flush=True)
