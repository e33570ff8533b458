"""The peer of the benchmarks, on arrays whose results are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddl_mpi.peer import MpiPeer
from mpi4py import MPI

import ddlcore as ddl
from ddlcore.api import current_job
from ddlcore.contracts.bench import BenchPeer
from ddlcore.errors import TransportError
from ddlcore.types import Kind


def main() -> None:
    """Check that the peer refuses ranks in an order other than MPI's, and works with MPI's order."""
    ddl.init()
    context = current_job().context("peer")
    with pytest.raises(TransportError, match=r"is rank . of 2 in MPI"):
        MpiPeer().open(context)
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    peer: BenchPeer = MpiPeer()
    peer.open(replace(context, rank=rank))
    one, whole = np.zeros(6, np.float32), np.zeros(6 * size, np.float32)

    one[:] = rank + 1
    peer.operation(Kind.ALLREDUCE, one, one)()
    assert (one == 3).all()
    one[:] = rank + 1
    peer.operation(Kind.BROADCAST, one, one)()
    assert (one == 1).all()
    one[:] = rank + 1
    peer.operation(Kind.ALLGATHER, one, whole)()
    assert whole.tolist() == [1.0] * 6 + [2.0] * 6
    peer.operation(Kind.REDUCESCATTER, whole, one)()
    assert one.tolist() == [2.0 * (rank + 1)] * 6
    whole[:] = rank
    out = np.zeros_like(whole)
    peer.operation(Kind.ALLTOALL, whole, out)()
    assert out.tolist() == [0.0] * 6 + [1.0] * 6
    with pytest.raises(NotImplementedError):
        peer.operation(Kind.BARRIER, one, one)
    peer.close()
    peer.close()
    ddl.shutdown()
    print("done")


if __name__ == "__main__":
    main()
