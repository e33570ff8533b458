"""Prints the functions of ddl through which one gradient goes in replay, from autograd's hook to ``.grad``, one a line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import ddl_torch as ddl
import torch

OURS = ("/ddlcore/", "/ddl_shm/", "/ddl_torch/", "/ddl_gloo/", "/ddl_mpi/")
# The places that a gradient comes to: noted when complete, put into its slot, launched, reduced, completed, in ``.grad``.
MILESTONES = (
    "Slot.on_gradient",
    "Submission.start_all",
    "TensorQueue.launch",
    "_PreparedBucket.try_run_atomic",
    "UserThreads._land",
    "Landing.complete",
    "place",
)
path: dict[str, None] = {}
reached: dict[str, None] = {}


def ours(file: str) -> bool:
    """Return whether ``file`` is ddl's and not a test."""
    return "/tests/" not in file and any(part in file for part in OURS)


def name_of(frame: FrameType) -> str:
    """Return the name of the function, with its class in front."""
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"


def follow(frame: FrameType, event: str, arg: Any) -> None:
    """Note the functions of ddl on the stack whenever the gradient comes to one of the places."""
    if event != "call" or not ours(frame.f_code.co_filename) or name_of(frame) not in MILESTONES:
        return
    reached[name_of(frame)] = None
    stack = []
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_code.co_filename
        for part in OURS:
            if part in name and ours(name):
                stack.append(f"{part[1:]}{name.rpartition(part)[2]}: {name_of(caller)}")
        caller = caller.f_back
    path.update(dict.fromkeys(reversed(stack)))


if __name__ == "__main__":
    ddl.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)  # two gradients in one bucket
    optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    found: list[str] = []  # what is printed
    for step in range(160):  # on each rank: one that ended before would be missed by the other
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        reached.clear()
        path.clear()
        sys.setprofile(follow if step >= 40 and not found else None)
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
        if not found and tuple(reached) == MILESTONES:  # this thread has run the bucket itself, in replay
            found = [" ".join(["reached", *reached]), *(f"through {line}" for line in path)]
    if ddl.rank() == 0:
        print("\n".join(found))
