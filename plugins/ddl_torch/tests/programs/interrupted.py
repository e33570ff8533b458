"""Trains while a timer's signal handler raises within ddl's code, and compares with the same training without it.

Arguments: the number of steps, the seed. After an interrupt the program continues the step if it can, and computes it
again if ddl says that it must. Prints how often the handler raised, and how often a step was computed again.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import ddl_torch as ddl
import torch
from torch import nn

PLACES = tuple(str(Path(module.__file__ or "").parent) for module in (ddl, sys.modules["ddlcore"]))


class Interrupted(Exception):
    """The exception that the handler raises."""


armed = False
struck = again = 0


def strike(_signal: int, frame: FrameType | None) -> None:
    global struck, armed
    if not armed:
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith(PLACES):
            armed = False
            struck += 1
            raise Interrupted
        frame = frame.f_back


def train(steps: int, seed: int, interrupts: bool) -> tuple[list[torch.Tensor], float]:
    global armed, again
    chance = random.Random(seed + 1000 * ddl.rank())
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    table = nn.Embedding(7, 2, sparse=True, dtype=torch.float64)
    parameters = [*model.parameters(), *table.parameters()]
    optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.05))
    seconds = []
    for step in range(steps):
        data = torch.Generator().manual_seed(1000 * step + ddl.rank())
        x = torch.randn(4, 6, generator=data, dtype=torch.float64)
        words = torch.randint(7, (4,), generator=data)
        begin_s = time.perf_counter()
        computed = False
        while not computed:
            try:
                armed = False
                optimizer.zero_grad()
                loss = (model(x) * table(words)).square().mean()
                if interrupts and chance.random() < 0.5:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + seconds_of_a_step * 1.5 * chance.random())
                    armed = True
                try:
                    loss.backward()
                except Interrupted:
                    optimizer.synchronize()
                computed = True
            except (ddl.IncompleteGradients, ddl.MismatchError):
                again += 1
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds.append(time.perf_counter() - begin_s)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters], sorted(seconds)[len(seconds) // 2]


if __name__ == "__main__":
    steps, seed = int(sys.argv[1]), int(sys.argv[2])
    ddl.init()
    seconds_of_a_step = 0.0
    expected, seconds_of_a_step = train(steps, seed, False)
    signal.signal(signal.SIGALRM, strike)
    found, _ = train(steps, seed, True)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), "an interrupted training comes to something else"
    print(f"struck {struck} again {again}", flush=True)
