"""Prints the functions of ddl through which one gradient goes in replay, from autograd's hook to ``.grad``, one a line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import ddl_torch as ddl
import torch

OURS = ("/ddlcore/", "/ddl_torch/", "/ddl_gloo/", "/ddl_mpi/")
# The places that a gradient comes to: noted when complete, put into its slot, launched, reduced, completed, in ``.grad``.
MILESTONES = ("on_gradient", "start_all", "launch", "try_run_atomic", "_land_here", "place")
path: dict[str, None] = {}
reached: list[str] = []


def ours(file: str) -> bool:
    """Return whether ``file`` is ddl's and not a test."""
    return "/tests/" not in file and any(part in file for part in OURS)


def follow(frame: FrameType, event: str, arg: Any) -> None:
    """Note the functions of ddl on the stack whenever the gradient comes to one of the places."""
    code = frame.f_code
    if event != "call" or code.co_name not in MILESTONES or not ours(code.co_filename):
        return
    reached.append(code.co_name)
    stack = []
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_code.co_filename
        for part in OURS:
            if part in name and ours(name):
                stack.append(f"{part[1:]}{name.rpartition(part)[2]}: {caller.f_code.co_name}")
        caller = caller.f_back
    path.update(dict.fromkeys(reversed(stack)))


if __name__ == "__main__":
    ddl.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(80):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        reached.clear()
        path.clear()
        sys.setprofile(follow if step >= 40 else None)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        sys.setprofile(None)
        optimizer.step()
        if reached == list(MILESTONES):  # this thread has run the bucket itself, in replay
            break
    if ddl.rank() == 0:
        print("reached", *reached)
        for line in path:
            print("through", line)
