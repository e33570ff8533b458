"""What the core learns of the MPI plugin before anything uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddlcore.api import built, enabled, threads_supported
from ddlcore.testing import run_world
from plugins.ddl_mpi.tests.jobs import PROGRAMS, run


def test_introducing_it_imports_nothing() -> None:
    """Asking for the plugin's providers does not load mpi4py."""
    check = (
        "import sys; from ddl_mpi import plugin; "
        "names = [p.name for p in plugin.ddl_transports() + plugin.ddl_communicators() + plugin.ddl_bench_peers()]; "
        "assert names == ['mpi'] * 3; assert 'mpi4py' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_is_built() -> None:
    """mpi_built() works before ``init``, and says nothing about what a job uses."""
    assert built("mpi")


def test_a_world_that_mpi_has_not_started() -> None:
    """A job without MPI says that it does not use MPI, and that mpi4py calls cannot be mixed with it.

    The error says what to do, and MPI is not initialized.
    """

    def program(rank: int, job: object) -> None:
        assert not enabled("mpi")
        with pytest.raises(ValueError, match=r"ddl run --backend mpi"):
            threads_supported("mpi")
        with pytest.raises(ValueError, match="not installed"):
            threads_supported("none such")

    run_world(2, program)
    assert "mpi4py.MPI" not in sys.modules


@pytest.mark.long
@pytest.mark.processes
def test_the_benchmark_starts_ranks_as_its_peer_wants_them() -> None:
    """`ddl bench --against mpi` starts ranks by MPI without any further option."""
    words = ["bench", "-np", "2", "--against", "mpi", "--ops", "allreduce", "--sizes", "64", "--rounds", "1"]
    shown = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", *words], capture_output=True, text=True, timeout=200
    )
    assert shown.returncode == 0, shown.stderr
    assert "mpi/shm" in shown.stdout


@pytest.mark.processes
def test_the_peer_of_the_benchmarks(tmp_path: Path) -> None:
    """Each collective of plain mpi4py gives the result that the contract asks for."""
    assert run(tmp_path, 2, PROGRAMS / "peer.py") == ["done\n"] * 2
