"""The peer mpi4py: `ddl bench` compares its blocking collectives with those of ddl. MPI must have started the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddl_mpi import process
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Context
from ddlcore.errors import TransportError
from ddlcore.types import Kind


class MpiPeer(BenchPeer):
    """A peer that calls mpi4py's collectives on its own communicator, a duplicate of MPI_COMM_WORLD.

    ``threads`` is the thread level with which MPI is initialized, if MPI is not initialized yet.
    """

    def __init__(self, threads: str = "multiple") -> None:
        self._threads = threads
        self._comm: Any = None
        self._in_place: Any = None

    def open(self, context: Context) -> None:
        """Initialize MPI if necessary, and create the communicator.

        Raises TransportError if MPI is missing, or if the ranks have other numbers in MPI than in ddl.
        """
        import mpi4py

        mpi4py.rc.thread_level = self._threads
        mpi = process.load()
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (context.rank, context.size):
            raise TransportError(
                f"rank {context.rank} of {context.size} is rank {world.rank} of {world.size} in MPI; "
                "its ranks must be MPI's own, in MPI's order: use --backend mpi"
            )
        self._comm, self._in_place = world.Dup(), mpi.IN_PLACE

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        if source.dtype.name == "bfloat16":
            raise NotImplementedError("MPI has no bfloat16")
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
        raise NotImplementedError(f"no {kind.name.lower()} is measured")

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None and not process.forsaken():
            comm.Free()
