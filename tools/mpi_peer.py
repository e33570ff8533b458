"""Bare mpi4py as a peer of the benchmarks; its ranks must have been started by mpiexec (see tools/mpi_world.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py

from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Context
from ddlcore.types import Kind

__all__ = ["MpiPeer"]


class MpiPeer(BenchPeer):
    """The world that mpiexec has made, in MPI's own order of ranks.

    ``threads`` is the level of thread support that MPI is asked for: mpi4py's default is "multiple".
    """

    def __init__(self, threads: str = "multiple") -> None:
        self._threads = threads
        self._comm: Any = None

    def open(self, context: Context) -> None:
        mpi4py.rc.thread_level = self._threads
        from mpi4py import MPI  # initializes

        comm = MPI.COMM_WORLD
        if (comm.rank, comm.size) != (context.rank, context.size):
            raise RuntimeError(
                f"rank {context.rank} of {context.size} is rank {comm.rank} of {comm.size} in MPI; start it by mpiexec"
            )
        self._comm = comm
        self._in_place = MPI.IN_PLACE

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        comm, in_place = self._comm, self._in_place
        if kind is Kind.ALLREDUCE:
            return lambda: comm.Allreduce(in_place, target)
        if kind is Kind.BROADCAST:
            return lambda: comm.Bcast(target, 0)
        if kind is Kind.ALLGATHER:
            return lambda: comm.Allgather(source, target)
        if kind is Kind.REDUCESCATTER:
            return lambda: comm.Reduce_scatter_block(source, target)
        if kind is Kind.ALLTOALL:
            return lambda: comm.Alltoall(source, target)
        raise NotImplementedError(f"no {kind.name.lower()}")

    def close(self) -> None:
        self._comm = None
