"""MPI on ranks that mpiexec has started, by the public functions and by the transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.ddl_mpi.tests.jobs import PROGRAMS, run
from tests.tiers import long

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.long
def test_memory_that_comes_again(tmp_path: Path) -> None:
    """Persistent requests give the right sums, whichever rank's memory changes, and touch no other memory."""
    assert run(tmp_path, 3, PROGRAMS / "persistent.py") == ["done\n"] * 3


def test_shared_memory_has_no_name(tmp_path: Path) -> None:
    """MPI's shared memory has no name, so a killed rank leaves none behind."""
    for said in run(tmp_path, 2, PROGRAMS / "names.py"):
        _, mapped, _, named = said.split()
        assert (int(mapped) > 0, int(named)) == (True, 0)


@pytest.mark.parametrize("own_calls", ["few", *long("none", "mixed")])
def test_a_steady_step_is_silent(tmp_path: Path, own_calls: str) -> None:
    """20 repeated steps send no control message, with persistent requests for large tensors.

    The program's own MPI calls run in between, in two of the 20 steps, in none or in all.
    """
    for said in run(tmp_path, 2, PROGRAMS / "steps.py", own_calls):
        assert said.startswith("messages 0 persistent "), said
        assert int(said.split()[3]) > 0


def test_integers_are_averaged_exactly(tmp_path: Path) -> None:
    """Averages of integers are exact at the limits of every type, negotiated and replayed."""
    assert run(tmp_path, 3, PROGRAMS / "integers.py") == ["exact\n"] * 3


@pytest.mark.long
@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_example_of_mixed_calls(tmp_path: Path, backend: str) -> None:
    """ddl and MPI agree about the ranks, whichever transport reduces the gradients."""
    said = run(tmp_path, 4, EXAMPLES / "mpi4py_mixed.py", environ={"DDL_BACKEND": backend})
    assert sorted(said) == ["", "", "", "4 ranks agree in ddl and in MPI\n"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_example_of_sub_communicators(tmp_path: Path, backend: str) -> None:
    """Four ranks form two jobs of two, in the order of the communicators."""
    said = run(tmp_path, 4, EXAMPLES / "mpi4py_subcomm.py", environ={"DDL_BACKEND": backend})
    worlds = ([0, 2], [1, 3])
    assert sorted(said) == [
        f"COMM_WORLD rank: {rank}, ddl rank: {rank // 2} of 2, with ranks {worlds[rank % 2]}, "
        f"whose sum is {sum(worlds[rank % 2])}\n"
        for rank in range(4)
    ]


@pytest.mark.long
def test_communicators_that_are_no_world(tmp_path: Path) -> None:
    """A wrong communicator gives one line on every rank, and the job can still begin afterwards."""
    assert run(tmp_path, 2, PROGRAMS / "wrong_comms.py") == ["done\n"] * 2
