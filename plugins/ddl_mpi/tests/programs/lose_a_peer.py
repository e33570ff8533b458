"""Reduces until a peer is lost, then ends as the argument says. Who imports MPI first must also finalize it."""

from __future__ import annotations

import sys
import time

import numpy as np


def main(first: str, end: str) -> None:
    """``first``: "program" or "ddl"; ``end``: "raise", "exit" (with 3) or "go on" (to the end of the program)."""
    if first == "program":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    import ddlcore as ddl

    ddl.init()
    values = np.ones(1 << 20, np.float32)
    moment_s = time.monotonic()
    try:
        while True:
            values = ddl.allreduce(values, op=ddl.Max, name="x")
            print("step", flush=True)
            moment_s = time.monotonic()
    except ddl.PeerLost as error:
        print(f"lost {error.ranks} after {time.monotonic() - moment_s:.2f} s", flush=True)
        if end == "raise":
            raise
        if end == "exit":
            sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
