"""Support for programs that use mpi4py: find the ranks of a communicator, and whether MPI supports several threads."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ddl_mpi import process
from ddlcore.contracts.communicators import Communicators
from ddlcore.errors import TransportError

HOW = "start the script by `ddl run --backend mpi` or by mpirun"
# Variables that mpiexec, srun and similar launchers set for MPI. Without these variables, MPI's world is one process.
STARTED = (
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
)


class MpiCommunicators(Communicators):
    """The support for communicators of mpi4py that users pass to ``init``.

    All processes of a communicator must call ``ranks_of``, because this method communicates.
    """

    def ranks_of(self, comm: Any, rank: int, size: int) -> Sequence[int]:
        from mpi4py import MPI

        if comm == MPI.COMM_NULL:
            raise ValueError("init: comm is MPI.COMM_NULL, to which no process belongs; call init only where it is not")
        if comm.Is_inter():
            raise ValueError("init: comm is an intercommunicator; pass an intracommunicator (comm.Merge() makes one)")
        if MPI.COMM_WORLD.Get_size() == 1 < size:
            raise ValueError(
                f"init: MPI did not start this process, and knows none of the other {size - 1}; {HOW}, "
                "or pass a list of ranks as comm"
            )
        mine, everyone = array("q", [rank]), array("q", [-1]) * comm.Get_size()
        comm.Allgather([mine, 1, MPI.INT64_T], [everyone, 1, MPI.INT64_T])
        ranks: list[int] = everyone.tolist()
        if len(set(ranks)) < len(ranks):
            raise ValueError(
                f"init: the processes of comm are not ranks of one job (their ranks are {ranks}); "
                "start them all by one `ddl run --backend mpi` or one mpirun"
            )
        return ranks

    def threads_supported(self, size: int) -> bool:
        connected = "mpi4py.MPI" in sys.modules or _started(os.environ)
        try:
            if connected and (process.load().COMM_WORLD.Get_size() > 1 or size == 1):
                return process.threads_supported()
        except TransportError as error:
            raise ValueError(str(error)) from error
        raise ValueError(f"this job does not use MPI, which did not start its processes; {HOW}")


def _started(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in STARTED)
