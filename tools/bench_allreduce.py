"""Times allreduce on one host: the transport alone, the whole call, and torch's Gloo on the same bytes, in alternation.

Run: ddl run -np 2 python tools/bench_allreduce.py [--rounds 9]

Each row is a size (float32). Ratios are medians over the rounds, with their quartiles: how many times
longer Gloo took than the transport, and than the whole call. Absolute times depend on the machine's mood.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import ddl_torch as ddl
import numpy as np
import torch
import torch.distributed as dist

from ddlcore.api import current_job
from ddlcore.contracts.transport import Plan
from ddlcore.types import DType, ReduceOp

SIZES_BYTES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
BUDGET_S = 0.15  # of one contender in one round


def transport_call(x: torch.Tensor) -> Callable[[], object]:
    """The open transport of the world, called as the engine calls it; nothing else is under way meanwhile."""
    transport = current_job().sets.communicator(0).transport
    prepared = transport.prepare(Plan((x.numel(),), DType.F32, ReduceOp.Sum, 1.0, 1.0 / ddl.size()))
    return lambda: prepared.start([x.data_ptr()], [x.data_ptr()])


def contenders(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each averages ``x`` over the ranks in place."""
    return {
        "shm": transport_call(x),
        "ddl": lambda: ddl.allreduce_(x, name=f"x{x.numel()}"),
        "gloo": lambda: (dist.all_reduce(x), x.div_(ddl.size())),
    }


def seconds(call: Callable[[], object], repeat: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, by contender and round; every rank repeats as often as rank 0 says."""
    x = torch.ones(nbytes // 4)
    calls = contenders(x)
    repeats = {}
    for name, call in calls.items():
        seconds(call, 8)  # warm: pages, routes, and a schedule for the whole call
        slowest = float(np.asarray(ddl.broadcast_object(seconds(call, 4))))
        repeats[name] = max(3, min(2000, int(BUDGET_S / slowest)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name]))
    return times


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:7.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ddl.init()
    dist.init_process_group("gloo")
    if ddl.rank() == 0:
        print(f"{ddl.size()} ranks; times in microseconds, medians of {rounds} rounds")
        print(
            f"{'bytes':>9} {'shm':>9} {'GB/s':>6} {'ddl':>9} {'gloo':>9}   {'gloo/shm':<22} {'gloo/ddl':<22}",
            flush=True,
        )
    for nbytes in SIZES_BYTES:
        times = measure(nbytes, rounds)
        if ddl.rank() == 0:
            middle = {name: statistics.median(values) for name, values in times.items()}
            against = {n: spread([g / t for g, t in zip(times["gloo"], times[n])]) for n in ("shm", "ddl")}
            print(
                f"{nbytes:>9} {middle['shm'] * 1e6:9.1f} {nbytes / middle['shm'] / 1e9:6.2f} {middle['ddl'] * 1e6:9.1f} "
                f"{middle['gloo'] * 1e6:9.1f}   {against['shm']:<22} {against['ddl']:<22}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()
    ddl.shutdown()


if __name__ == "__main__":
    main()
