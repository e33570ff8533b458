"""Every rank gets the same line that says why the processes cannot have a communicator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ddl_conform.store import ThreadStore
from ddl_mpi.meeting import check_threads, objection

from ddlcore.contracts.transport import Context
from ddlcore.errors import TransportError
from ddlcore.types import Member

MPICH, OTHER = "MPICH Version: 5.0.2", "Open MPI v5.0.11"


def _objection(*facts: tuple[int, int, str]) -> str:
    kernels: Any = None
    members = tuple(Member(rank, 0) for rank in range(len(facts)))
    return objection(Context(0, members, ThreadStore(), kernels, {}, 1.0, "test"), [[*fact, 0] for fact in facts])


def test_one_world() -> None:
    """Any ranks of one MPI world are accepted, in any order."""
    assert _objection((3, 4, MPICH), (1, 4, MPICH)) == ""


def test_two_mpis_mixed() -> None:
    """If ranks load two MPIs, the line names both with their ranks, and says what to do."""
    text = _objection((0, 2, MPICH), (0, 1, OTHER), (1, 2, MPICH))
    assert "two MPIs are mixed (ranks 0, 2: MPICH Version: 5.0.2; rank 1: Open MPI v5.0.11)" in text
    assert "install the same one" in text


def test_not_started_by_mpi() -> None:
    """Processes that MPI has not started are each alone in a world of MPI, which is refused."""
    text = _objection((0, 1, MPICH), (0, 1, MPICH))
    assert "not started by MPI" in text and "ddl run --backend mpi" in text


def test_two_worlds_of_mpi() -> None:
    """Ranks in two MPI worlds are refused, and so are ranks of which mpiexec has started only some."""
    assert "not in one world of MPI" in _objection((0, 2, MPICH), (0, 2, MPICH))
    assert "not in one world of MPI" in _objection((0, 2, MPICH), (0, 1, MPICH))


@pytest.mark.parametrize(("level", "name"), [(0, "SINGLE"), (1, "FUNNELED"), (2, ""), (3, "")])
def test_levels_of_threads(level: int, name: str) -> None:
    """A thread level below SERIALIZED is refused; the error names the level, and says how to get another."""
    mpi = SimpleNamespace(Query_thread=lambda: level, THREAD_FUNNELED=1, THREAD_SERIALIZED=2)
    if not name:
        check_threads(mpi)
        return
    with pytest.raises(TransportError, match=rf"MPI_THREAD_{name}.*thread_level"):
        check_threads(mpi)
