"""The MPI transport passes the transport suite, on processes that mpiexec has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ddl_mpi.conformance import MpiSuite
from ddl_mpi.process import SHARED


@pytest.mark.processes
class TestMpi(MpiSuite):
    """The transport suite as `ddl conform mpi` runs it."""


@pytest.mark.long
@pytest.mark.processes
class TestAcrossHosts(MpiSuite):
    """The suite with MPI between hosts and shared memory within them.

    One host has two ranks more than the other, so some ranks communicate across hosts and some do not.
    """

    target = "plugins.ddl_mpi.tests.composed:ShmOverMpi"
    first = ""  # no rank initializes MPI unless the transport does
    sizes = (4,)

    def hosts(self, size: int) -> Sequence[int]:
        return (0, 1, 1, 1)

    def settings(self) -> Mapping[str, str | int | float | bool]:
        return {**super().settings(), "hierarchical_chunk_bytes": 64 << 10}

    def test_what_mpi_shares_has_no_name(self) -> None:
        """MPI's shared memory has no name, so a killed rank leaves none behind.

        This holds although some ranks take no part in MPI.
        """
        self.group(4)
        pids = self.processes.pids
        shared = [line for pid in pids for line in _maps(pid) if any(name in line for name in SHARED)]
        assert shared
        assert all(line.endswith("(deleted)") for line in shared)


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()
