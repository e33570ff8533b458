"""A rank that prints its number in ddl and in MPI; rank 1 may end as the argument says."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

import ddlcore as ddl


def step() -> float:
    """Run one collective."""
    return float(ddl.allreduce(np.ones(100, dtype=np.float32), name="x", op=ddl.Sum)[0])


def main() -> None:
    """Run as the first argument says."""
    ddl.init()
    world = MPI.COMM_WORLD
    line = f"rank {ddl.rank()} of {ddl.size()}, MPI's {world.rank} of {world.size}, sum {step():g}"
    print(f"{line}, route {ddl.stats()['routes'][0]}", flush=True)
    if len(sys.argv) == 1:
        return
    if ddl.rank() == 1:
        if sys.argv[1] == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            step()
    except ddl.PeerLost as error:
        print(f"lost {error.ranks}", flush=True)
        sys.exit(7)


if __name__ == "__main__":
    main()
