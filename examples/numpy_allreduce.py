"""Sums one array of each rank, and checks that every rank has the same sum.

ddl run -np 32 python examples/numpy_allreduce.py
"""

import argparse
import time

import numpy as np

import ddlcore as ddl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000, help="float32 values in each rank's array")
    parser.add_argument("--rounds", type=int, default=5, help="how often it is added")
    options = parser.parse_args()

    begun = time.perf_counter()
    ddl.init()
    ready = time.perf_counter()

    mine = np.full(options.elements, ddl.rank() + 1, dtype=np.float32)
    expected = ddl.size() * (ddl.size() + 1) / 2  # 1 + 2 + … + size
    seconds = []
    for _ in range(options.rounds):
        ddl.barrier()
        before = time.perf_counter()
        total = ddl.allreduce(mine, op=ddl.Sum, name="total")
        seconds.append(time.perf_counter() - before)
        if not np.all(total == expected):
            raise SystemExit(f"rank {ddl.rank()}: the sum is {total.min()} to {total.max()}, not {expected}")

    slowest = ddl.allreduce(np.array(min(seconds)), op=ddl.Max, name="slowest")
    agreed = ddl.allgather_object(float(total[0]))
    if set(agreed) != {expected}:
        raise SystemExit(f"rank {ddl.rank()}: the ranks have {agreed}")
    if ddl.rank() == 0:
        print(f"{ddl.size()} ranks agree: every element is {expected:g}")
        print(f"init took {ready - begun:.3f} s, an allreduce of {mine.nbytes / 2**20:.1f} MiB {float(slowest):.4f} s")
    ddl.shutdown()


if __name__ == "__main__":
    main()
