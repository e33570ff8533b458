"""When a peer dies, the others get an error at once, and their processes end although MPI itself would wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plugins.ddl_mpi.tests.jobs import PROGRAMS, Job
from tests.tiers import long

pytestmark = pytest.mark.processes

ENDS = {"raise": 1, "exit": 3, "go on": 0}  # exit codes


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("first", ["ddl", *long("program")])
def test_a_killed_peer(tmp_path: Path, first: str, end: str) -> None:
    """When one rank is killed, the others raise PeerLost and then end with their own exit codes."""
    job = Job(tmp_path, 3, PROGRAMS / "lose_a_peer.py", first, end)
    try:
        for rank in range(3):
            job.await_word(rank, "step")
        job.kill(1)
        for rank in (0, 2):
            job.await_word(rank, "lost (1,)")
        assert [job.await_end(rank) for rank in (0, 2)] == [ENDS[end]] * 2, job.told()  # MPI alone would wait forever
        for rank in (0, 2):
            found = re.search(r"lost \(1,\) after ([\d.]+) s", job.output(rank))
            assert found is not None and float(found[1]) < 20.0, job.told()
    finally:
        job.close()


@pytest.mark.parametrize(("end", "code"), [("raise", 1), *long(("exit", 3))])
@pytest.mark.parametrize("first", ["ddl", *long("program")])
def test_a_rank_that_leaves(tmp_path: Path, first: str, end: str, code: int) -> None:
    """A rank that leaves does not wait in MPI for the others; they raise PeerLost and end with code 1."""
    job = Job(tmp_path, 3, PROGRAMS / "leave.py", first, end)
    try:
        assert [job.await_end(rank) for rank in range(3)] == [1, code, 1], job.told()
        assert "PeerLost" in job.output(0), job.told()
    finally:
        job.close()
