"""Runs init(), an allreduce and shutdown() a hundred times in one process, and prints the seconds it took."""

from __future__ import annotations

import time

import ddl_torch as ddl
import torch

if __name__ == "__main__":
    begin = time.perf_counter()
    for turn in range(100):
        ddl.init()
        total = ddl.allreduce(torch.full((3,), float(ddl.rank() + turn)), op=ddl.Sum)
        assert total.tolist() == [2.0 * turn + 1] * 3, total
        ddl.shutdown()
    print(f"seconds {time.perf_counter() - begin:.2f}", flush=True)
