"""Communicators that ``init`` refuses, and some that it accepts."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import ddlcore as ddl


def main() -> None:
    """Check them on ranks that are MPI's in reverse order, so that mixing up the two numberings fails."""
    world = MPI.COMM_WORLD
    with pytest.raises(ValueError, match="COMM_NULL"):
        ddl.init(comm=MPI.COMM_NULL)
    inter = MPI.COMM_SELF.Create_intercomm(0, world, 1 - world.rank, 5)
    with pytest.raises(ValueError, match="intercommunicator"):
        ddl.init(comm=inter)
    with pytest.raises(ValueError, match="expected a list of ranks"):
        ddl.init(comm=world.Get_group)

    for comm, size in ((world, 2), (MPI.COMM_SELF, 1), (inter.Merge(), 2), (world.Split(0, -world.rank), 2)):
        ddl.init(comm=comm)
        assert (ddl.rank(), ddl.size()) == (comm.rank, size)
        assert ddl.allreduce(np.array([float(comm.rank)]), op=ddl.Sum)[0] == sum(range(size))
        ddl.shutdown()
    print("done")


if __name__ == "__main__":
    main()
