"""The MPI transport passes the transport suite, on processes that mpiexec has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ddl_mpi.library import find_library
from ddl_mpi.process import SHARED

from ddlcore.errors import PluginError
from ddlcore.testing import ProcessSuite

# As root in a container, and with more ranks than cores, Open MPI wants to be told that this is meant.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.processes
class TestMpi(ProcessSuite):
    target = "ddl_mpi.transport:MpiTransport"
    first = "ddl_mpi.process:load"  # waits for all processes that mpiexec has started, not only for a group's

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


@pytest.mark.processes
class TestAcrossHosts(TestMpi):
    """With shared memory within hosts, of which one has two ranks more than another: some cross, some do not."""

    target = "plugins.ddl_mpi.tests.composed:ShmOverMpi"
    first = ""  # no rank begins MPI unless the transport sees to it
    sizes = (4,)

    def hosts(self, size: int) -> Sequence[int]:
        return (0, 1, 1, 1)

    def settings(self) -> Mapping[str, str | int | float | bool]:
        return {**super().settings(), "hierarchical_chunk_bytes": 64 << 10}

    def test_what_mpi_shares_has_no_name(self) -> None:
        """So a rank that is killed leaves none behind, though some ranks have no part in MPI."""
        self.group(4)
        pids = self.processes.pids
        shared = [line for pid in pids for line in _maps(pid) if any(name in line for name in SHARED)]
        assert shared
        assert all(line.endswith("(deleted)") for line in shared)


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()
