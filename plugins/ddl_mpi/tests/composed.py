"""MPI between hosts and shared memory within them, as a transport that the suite's processes can make."""

from __future__ import annotations

from ddl_mpi.transport import MpiTransport
from ddl_shm.hierarchical.transport import HierarchicalTransport
from ddl_shm.transport import ShmTransport

from ddlcore.contracts.transport import Capabilities

__all__ = ["ShmOverMpi"]


class ShmOverMpi(HierarchicalTransport):
    """The transport that `--backend shm+mpi` makes."""

    capabilities = Capabilities(order_fixed=True, host_first=True)  # the suite reads them from the class

    def __init__(self) -> None:
        super().__init__(ShmTransport(), MpiTransport, attended=True)
