"""The MPI transport passes the transport suite, on processes that mpiexec has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ddl_mpi.conformance import MpiSuite
from ddl_mpi.process import SHARED


@pytest.mark.processes
class TestMpi(MpiSuite):
    """As `ddl conform mpi` runs it."""


@pytest.mark.processes
class TestAcrossHosts(MpiSuite):
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
