"""Rank 1 leaves by itself, as the argument says, while the others continue until they get an error."""

from __future__ import annotations

import sys

import numpy as np


def main(first: str, end: str) -> None:
    """``first`` says who initializes MPI: "program" or "ddl".

    ``end`` says how rank 1 ends: "raise", or "exit" (with 3).
    """
    if first == "program":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    import ddlcore as ddl

    ddl.init()
    values = np.ones(1 << 18, np.float32)
    for step in range(1000):
        if step == 20 and ddl.rank() == 1:
            if end == "raise":
                raise ArithmeticError("a fault of this rank alone")
            sys.exit(3)
        values = ddl.allreduce(values, op=ddl.Max, name="x")


if __name__ == "__main__":
    main(*sys.argv[1:])
