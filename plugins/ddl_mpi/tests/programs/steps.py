"""Training steps without training: gradients of several types and sizes, while the program calls MPI itself."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ddlcore as ddl
from ddlcore.api import current_job, threads_supported

SHAPES = ((300_000,), (7,), (64, 64), (1,), (50_000,))
STEPS = 20
WINDOWS = 4  # in the first the schedule is found; on a slow machine, a rank may leave replay in another


def step(gradients: list[Any], number: int, own_call: bool) -> None:
    """Make one step, and check its sums. ``own_call``: whether the program itself calls MPI while ddl reduces."""
    for gradient in gradients:
        gradient[...] = ddl.rank() + number
    handles = [ddl.allreduce_async_(g, op=ddl.Sum, name=f"g{i}") for i, g in enumerate(gradients)]
    if own_call:
        from mpi4py import MPI

        mine, total = np.full(20_000, float(number)), np.zeros(20_000)
        MPI.COMM_WORLD.Allreduce(mine, total)
        assert (total == number * ddl.size()).all()
    for handle in handles:
        handle.wait()
    for gradient in gradients:
        assert (gradient == sum(range(ddl.size())) + number * ddl.size()).all(), number


def main(own_calls: str) -> None:
    """``own_calls`` says in which steps the program itself calls MPI: "mixed" all, "few" two of each 20, or "none"."""
    ddl.init()
    assert threads_supported("mpi")
    gradients = [np.zeros(shape, np.float32) for shape in SHAPES] + [np.zeros(999, np.int64)]
    messages = []
    for window in range(WINDOWS):
        before = ddl.stats()["control_messages"]
        for number in range(STEPS):
            calls = own_calls == "mixed" or (own_calls == "few" and number in (1, STEPS // 2))
            step(gradients, window * STEPS + number, calls)
        messages.append(ddl.stats()["control_messages"] - before)
    kept = current_job().sets.communicator(0).transport._collectives._requests  # type: ignore[attr-defined]  # MPI's
    print(f"messages {min(messages)} persistent {sum(not isinstance(one, int) for one in kept.values())} of {messages}")
    ddl.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
