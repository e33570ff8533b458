"""Tell the conformance kit how to test the transport: mpiexec starts a process for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ddl_mpi.library import find_library
from ddlcore.errors import PluginError
from ddlcore.testing import ProcessSuite

# Without these variables, Open MPI refuses to run as root, or with more ranks than cores.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class MpiSuite(ProcessSuite):
    """The tests that `ddl conform mpi` runs on the transport."""

    target = "ddl_mpi.transport:MpiTransport"
    first = "ddl_mpi.process:load"  # waits for all processes that mpiexec has started, not only for those of one group

    @classmethod
    def setup_class(cls) -> None:
        try:
            find_library()
        except PluginError as error:
            pytest.skip(str(error))
        super().setup_class()

    @classmethod
    def command(cls, program: Sequence[str], size: int) -> Sequence[str]:
        return [find_library().mpiexec, "-n", str(size), *program]

    @classmethod
    def environ(cls) -> Mapping[str, str]:
        return {**super().environ(), **OPENMPI}
