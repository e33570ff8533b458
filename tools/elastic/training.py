"""One rank of the trainings that tools/bench_elastic.py times: writes when it was imported and when each step ended.

Arguments: a folder, the milliseconds that a step computes, and "elastic" or "plain". The file in the folder that is named
after the process has a line for each event: the word, the moment (monotonic seconds), and numbers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def process_age_s() -> float:
    """Return for how long this process has existed."""
    begun_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun_ticks / os.sysconf("SC_CLK_TCK")


import ddl_torch as ddl  # noqa: E402  # imports are part of what is timed
import torch  # noqa: E402
from ddl_torch import elastic  # noqa: E402

FOLDER, COMPUTE_S, WAY = Path(sys.argv[1]), float(sys.argv[2]) / 1000, sys.argv[3]
WIDTH = 256  # two layers: 0.5 MB
MARK = 50  # the step from which on control messages are counted: the schedule is known by then
log = os.open(FOLDER / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def note(word: str, *numbers: float) -> None:
    os.write(log, f"{word} {time.monotonic():.6f} {' '.join(map(str, numbers))}\n".encode())


def count_messages(steps: int) -> None:
    """Write how many control messages this rank has sent so far, at every MARK steps."""
    if steps % MARK == 0:
        note("messages", steps, ddl.stats()["control_messages"])


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    time.sleep(COMPUTE_S)  # stands for the computation of an accelerator, which other ranks do not slow down
    optimizer.step()


@elastic.run
def train(state: elastic.TorchState, rows: torch.Tensor) -> None:
    while not ddl.should_stop():
        step(state.model, state.optimizer, rows)
        state.commit()
        note("step", state.steps, ddl.size())
        count_messages(state.steps)


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Train as a script does that knows nothing of elastic jobs."""
    ddl.broadcast_parameters(model.state_dict(), root_rank=0)
    steps = 0
    while not ddl.should_stop():
        step(model, optimizer, rows)
        steps += 1
        note("step", steps, ddl.size())
        count_messages(steps)


def main() -> None:
    note("imported", process_age_s())
    ddl.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = ddl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), named_parameters=model.named_parameters()
    )
    rows = torch.randn(8, WIDTH)
    if WAY == "plain":
        plain(model, optimizer, rows)
    else:
        train(elastic.TorchState(model, optimizer), rows)


if __name__ == "__main__":
    main()
