"""Whether and when a rank that has failed is started again, and how an elastic job has ended."""

from __future__ import annotations

import signal
from typing import Any

from ddlcore.launch.ranks.exit_status import End, exit_code
from ddlcore.launch.ranks.revival import Revival

KILL = -int(signal.SIGKILL)


class Job:
    """What a revival asks."""

    def __init__(self, restarts: int = 3, startable: range = range(4)) -> None:
        self.over = ""
        self.complete = False
        self.world: tuple[int, Any] = (1, (0, 1, 2, 3))
        self.revival = Revival(
            restarts, 1.0, startable.__contains__, lambda: self.over, lambda: self.complete, lambda: self.world
        )


def test_back_off() -> None:
    """At once, then after 1, 2, 4 … seconds, and no more often than allowed within ten minutes."""
    job = Job(restarts=4)
    assert [job.revival.delay_s(End(1, KILL, at)) for at in (0.0, 10.0, 20.0, 30.0, 40.0)] == [0.0, 1.0, 2.0, 4.0, None]
    assert job.revival.delay_s(End(2, KILL, 50.0)) == 0.0
    assert job.revival.delay_s(End(1, KILL, 2000.0)) == 0.0, "ten minutes have passed"


def test_a_process_that_ended_by_itself_is_not_started_at_once() -> None:
    job = Job()
    assert [job.revival.delay_s(End(1, 1, at)) for at in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, None]


def test_who_is_not_started_again() -> None:
    job = Job(startable=range(2))
    assert job.revival.delay_s(End(3, KILL, 0.0)) is None, "a rank of another host"
    assert job.revival.delay_s(End(1, 0, 0.0)) is None, "it has ended well"
    job.world = (0, ())
    assert job.revival.delay_s(End(1, 1, 0.0)) is None, "a mistake in the script"
    assert job.revival.delay_s(End(1, KILL, 0.0)) == 0.0
    job.over = "too few"
    assert job.revival.delay_s(End(0, KILL, 0.0)) is None
    job.over, job.complete = "", True
    assert job.revival.delay_s(End(0, KILL, 0.0)) is None


def test_a_job_that_has_failed_still_waits_for_those_that_may_write_a_checkpoint() -> None:
    """They have been told, and raise an error; processes that were never in the world have nothing to write."""
    job = Job()
    job.world = (2, (0, 1))
    assert not job.revival.has_failed([2])
    job.over = "too few"
    assert job.revival.has_failed([2]) and job.revival.has_failed([]) and not job.revival.has_failed([1, 2])
    job.complete = True
    assert not job.revival.has_failed([2])


def test_a_job_that_was_completed_has_succeeded() -> None:
    job = Job()
    job.revival.delay_s(End(2, KILL, 1.0))
    job.world, job.complete = (2, (0, 1, 3)), True
    assert job.revival.is_done([2]) and not job.revival.is_done([2, 3])
    for rank in (0, 1, 3):
        job.revival.delay_s(End(rank, 0, 9.0))
    job.revival.delay_s(End(2, -15, 9.5, stopped=True))
    assert exit_code(job.revival.relevant()) == 0


def test_a_failure_after_the_end_of_the_training_counts() -> None:
    job = Job()
    job.complete = True
    for rank, code in enumerate((0, 3, 0, 0)):
        job.revival.delay_s(End(rank, code, 9.0))
    assert exit_code(job.revival.relevant()) == 3


def test_a_failure_that_was_mended_is_not_the_cause() -> None:
    """Rank 3 was lost in the first world and never came back; the training went on without it."""
    job = Job()
    job.revival.delay_s(End(3, KILL, 1.0))
    job.world = (2, (0, 1))
    job.revival.delay_s(End(0, -11, 50.0))
    job.revival.delay_s(End(1, -11, 51.0))
    ends = job.revival.relevant()
    assert [end.rank for end in ends] == [0, 1] and exit_code(ends) == 139


def test_the_cause_is_the_first_end_in_the_last_world() -> None:
    """Neither what was mended before, nor what the processes that came later say."""
    job = Job()
    job.revival.delay_s(End(0, KILL, 1.0))
    job.world = (2, (0, 1, 2, 3))
    job.revival.delay_s(End(1, 7, 50.0))
    job.over = "all have ended"
    for rank in (0, 2, 3):
        job.revival.delay_s(End(rank, 7, 51.0))
    job.revival.delay_s(End(1, 1, 60.0))
    ends = job.revival.relevant()
    assert [(end.rank, end.at_s) for end in ends] == [(1, 50.0), (0, 51.0), (2, 51.0), (3, 51.0)]
    assert exit_code(ends) == 7
