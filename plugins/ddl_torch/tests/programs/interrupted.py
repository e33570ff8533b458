"""Trains while a timer's handler raises within ddl's code; prints a digest of the parameters, and how often it raised.

Arguments: how many steps, the seed. What is interrupted is continued by synchronize() or step(), as a program may.
"""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import ddl_torch as ddl
import torch
from torch import nn

PLACES = tuple(str(Path(module.__file__ or "").parent) for module in (ddl, sys.modules["ddlcore"]))


class Interrupted(Exception):
    """What the handler raises."""


armed = False
struck = 0


def strike(_signal: int, frame: FrameType | None) -> None:
    global struck
    if not armed:
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith(PLACES):
            struck += 1
            raise Interrupted
        frame = frame.f_back


def train(steps: int, seed: int, interrupts: bool) -> list[torch.Tensor]:
    global armed
    chance = random.Random(seed + 1000 * ddl.rank())
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    table = nn.Embedding(7, 2, sparse=True, dtype=torch.float64)
    parameters = [*model.parameters(), *table.parameters()]
    optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.05))
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(1000 * step + ddl.rank())
        x = torch.randn(4, 6, generator=data, dtype=torch.float64)
        words = torch.randint(7, (4,), generator=data)
        loss = (model(x) * table(words)).square().mean()
        if interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.002 * chance.random() ** 2)
        # An exception may come right before or right behind what it was to interrupt, too: that is tried again.
        done = begun = False
        while not done:
            try:
                armed = True
                if not begun:
                    begun = True
                    loss.backward()
                else:
                    optimizer.synchronize()
                armed = False
                done = True
            except Interrupted:
                armed = False
                if interrupts and chance.random() < 0.5:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.001 * chance.random())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


if __name__ == "__main__":
    steps, seed = int(sys.argv[1]), int(sys.argv[2])
    ddl.init()
    expected = train(steps, seed, False)
    signal.signal(signal.SIGALRM, strike)
    found = train(steps, seed, True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other), "an interrupted training comes to something else"
    print(f"struck {struck}", flush=True)
