"""Worlds of threads: results by rank, the first real error with its rank, and never a hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ddl_conform.ranks import Ranks

import ddlcore
from ddlcore.errors import PeerLost, TransportError
from ddlcore.process.job import Job
from ddlcore.testing import DeadlinePassed, World, run_world


def notes(error: BaseException) -> str:
    """What the world wrote beside the error."""
    return "\n".join(getattr(error, "__notes__", ()))


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")


@pytest.mark.parametrize("backend", ["threads", pytest.param("shm", marks=linux_only)])
def test_results_come_by_rank(backend: str) -> None:
    """Each thread's verbs act on its own job."""

    def play(rank: int, job: Job) -> tuple[int, int, float]:
        total = ddlcore.allreduce(np.array([float(rank)]), name="x", op=ddlcore.Sum)
        return ddlcore.rank(), job.size, float(total[0])

    assert run_world(3, play, backend=backend) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]


def test_a_world_runs_several_functions() -> None:
    """From with to its end; at its end every job is closed."""
    with World(2) as world:
        first = world.run(lambda rank, job: ddlcore.broadcast_object(rank, 1))
        second = world.run(lambda rank, job: ddlcore.allgather_object(rank))
        jobs = world.jobs
    assert (first, second) == ([1, 1], [[0, 1], [0, 1]])
    assert all(job.closed for job in jobs)


def test_the_first_error_is_raised_with_its_rank() -> None:
    """The others' PeerLost is its consequence, and is told in its note."""

    def play(rank: int, job: Job) -> None:
        if rank == 1:
            raise KeyError("what went wrong")
        ddlcore.allreduce(np.zeros(3), name="never")

    begin_s = time.monotonic()
    with pytest.raises(KeyError, match="what went wrong") as raised:
        run_world(3, play)
    note = notes(raised.value)
    assert "raised on rank 1 of 3" in note
    assert "rank 0: PeerLost" in note
    assert "rank 2: PeerLost" in note
    assert time.monotonic() - begin_s < 20.0


def test_a_rank_that_ends_early_hangs_nobody() -> None:
    """Who still needs it gets PeerLost."""

    def play(rank: int, job: Job) -> None:
        if rank == 0:
            ddlcore.allreduce(np.zeros(3), name="alone")

    with pytest.raises(PeerLost):
        run_world(2, play)


def test_a_hang_becomes_a_failure_with_stacks() -> None:
    """The deadline ends the collective and shows where each rank was."""
    over = threading.Event()

    def play(rank: int, job: Job) -> None:
        if rank == 0:
            over.wait(3)  # as if it computed for ever
        else:
            ddlcore.allreduce(np.zeros(3), name="stuck")

    begin_s = time.monotonic()
    with pytest.raises(DeadlinePassed) as raised:
        run_world(2, play, deadline_s=0.5, settings={"leave_timeout_s": 0.2})
    over.set()
    text = str(raised.value)
    assert "ranks 0, 1 of 2 did not end within 0.5 s" in text
    assert "over.wait(3)" in text
    assert 'name="stuck"' in text
    assert time.monotonic() - begin_s < 20.0


def test_ranks_are_told_to_end_when_one_has_raised() -> None:
    """The abort runs once the others had time to end by themselves; secondary errors come second."""
    over = threading.Event()

    def play(rank: int) -> None:
        if rank == 0:
            raise ValueError("bad")
        over.wait(80)
        raise TransportError("aborted")

    ranks = Ranks(2)
    with pytest.raises(ValueError, match="bad") as raised:
        ranks.run(play, 20, over.set)
    ranks.close()
    assert "rank 1: TransportError: aborted" in notes(raised.value)


def test_worlds_need_no_pytest() -> None:
    """``ddlcore.testing`` and its worlds import neither pytest nor hypothesis."""
    code = (
        "import sys; from ddlcore.testing import World, run_world; print({'pytest', 'hypothesis'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("backend", ["threads", pytest.param("shm", marks=linux_only)])
def test_the_first_world_of_a_process(backend: str) -> None:
    """Its ranks load everything, compiled kernels included, at the same moment."""
    code = f"""
import numpy as np, ddlcore
from ddlcore.testing import run_world
play = lambda rank, job: float(ddlcore.allreduce(np.array([0.5]), name="x", op=ddlcore.Sum, prescale_factor=2.0)[0])
print(run_world(4, play, backend={backend!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.strip()) == (0, "[4.0, 4.0, 4.0, 4.0]"), done.stderr[-2000:]
