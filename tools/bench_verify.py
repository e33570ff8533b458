"""Measures what it costs one rank to compare the ranks' parameters in a step, on the CPU.

ddl run -np 2 python tools/bench_verify.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import ddl_torch as ddl
import torch
from torch import nn

__all__ = ["main"]

MODELS: dict[str, list[tuple[int, ...]]] = {  # the number and size of parameters of well-known models
    "one of 11 million, 62 tensors (as ResNet-18)": [(512, 353)] * 62,
    "deep: 402 small tensors": [(50, 50), (50,)] * 201,
}


def main() -> None:
    """Print a line for each model, on rank 0: milliseconds of a step without a check, and with one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    ddl.init()
    for name, shapes in MODELS.items():
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        taken = {}
        for checked in (False, True):
            times = []
            for _ in range(steps):
                ddl.barrier()
                begun = time.perf_counter()
                if checked:
                    ddl.verify(params)
                else:
                    ddl.barrier()
                times.append(1000 * (time.perf_counter() - begun))
            taken[checked] = statistics.median(times)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        told = _beside(optimizer, params, steps)
        if ddl.rank() == 0:
            count = sum(p.numel() for p in params)
            print(
                f"{name} ({count / 1e6:.1f} million): beside the job {told:.2f} ms, verify() {taken[True]:.2f} ms "
                f"(a barrier alone: {taken[False]:.2f} ms)",
                flush=True,
            )


def _beside(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> float:
    """Return the median milliseconds that the check of one step takes, if every step is checked."""
    for param in params:
        param.grad = torch.zeros_like(param)
    hooks = optimizer._optimizer_step_post_hooks.values()
    (hook,) = [one for one in hooks if one.__module__ == "ddl_torch.replicas"]  # the hook that calls the check
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        hook(optimizer, (), {})
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


if __name__ == "__main__":
    main()
