"""A stall in replay: who waits where, who has not come, and what is missing there, said once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.job import Job
from ddlcore.messages import Standing
from ddlcore.runtime.standing import ANSWER_S, Standings
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(240)

WARNING_S = 0.2
ALARM = Standing(3, 12, True, 0, ("a", "b"), (), True)


def test_all_are_asked_once_and_the_report_names_who_lacks_what() -> None:
    """By the first alarm of a batch; the second one is an answer. Nothing is said twice."""
    one = Standings()
    assert one.hear(0, ALARM, range(4)) == [1, 2, 3]
    assert one.hear(2, ALARM, range(4)) == []
    assert one.report(3, 0.0, 60.0) == [], "two have not answered"
    one.hear(1, Standing(3, 12, False, 0, ("a", "b"), ("b",)), range(4))
    one.hear(3, Standing(3, 11, True, 0, ("z",)), range(4))
    (report,) = one.report(3, 0.0, 60.0)
    assert report.splitlines() == [
        "stalled for more than 60 s in replay (epoch 3, place 12):",
        "  tensor  ready on  missing ranks  waits s",
        "  a       0-2       3                 60.0",
        "  b       0,2       1,3               60.0",
        "  rank 3: in 'z' (place 11)",
    ]
    assert one.absent == (1, 3)
    assert one.what == "'a' is ready on ranks 0-2, but not on rank 3; rank 3: in 'z' (place 11)"
    assert one.report(3, 100.0, 60.0) == []
    assert one.hear(0, ALARM, range(4)) == [], "the same batch"


def test_a_rank_that_does_not_answer_is_named() -> None:
    """Its process may be stopped: the report does not wait for it."""
    one = Standings()
    one.hear(0, ALARM, range(2))
    assert one.report(3, 5.0, 60.0) == []
    (report,) = one.report(3, 5.0 + ANSWER_S, 60.0)
    assert "  a       0         1                 62.0" in report
    assert report.endswith("rank 1: not answering")
    assert one.absent == (1,)


def test_a_batch_that_all_have_entered_is_the_networks() -> None:
    """Nobody is missing, and nobody is asked for a stack. A rank that has gone on was there, too."""
    one = Standings()
    one.hear(0, ALARM, range(3))
    one.hear(1, ALARM, range(3))
    one.hear(2, Standing(3, 13, False, 0, ("z",), ("z",)), range(3))
    (report,) = one.report(3, 0.0, 60.0)
    assert "  a       0-2       none              60.0" in report
    assert report.endswith("every rank has entered it: the transport or the network holds it up")
    assert one.absent == ()


def test_ranks_of_which_the_same_is_to_be_said_share_a_line() -> None:
    """Five hundred ranks that stand one batch behind are one line."""
    one = Standings()
    one.hear(0, ALARM, range(501))
    for rank in range(1, 501):
        one.hear(rank, Standing(3, 11, False, 7, ("z", ""), ("z", "")), range(501))
    (report,) = one.report(3, 0.0, 60.0)
    assert (
        report.splitlines()[-1] == "  ranks 1-500: at place 11, without 'z', '(a call without a name)' in process set 7"
    )
    assert len(report.splitlines()) == 5


def test_a_stall_that_was_left_is_not_reported() -> None:
    """In discovery the coordinator's table knows what waits; an old answer is not taken for a new one."""
    one = Standings()
    one.hear(0, ALARM, range(2))
    one.hear(1, Standing(4, 13, True, 0, ("a",)), range(2))
    assert one.report(4, 0.0, 60.0) == []
    assert one.report(4, 10.0, 60.0) == []


def play(late: Callable[[], None], warning_s: float, dtype: type = np.float64) -> tuple[list[int], list[int]]:
    """Thirty steps on three ranks; in the 20th rank 1 is ``late`` between two tensors, in one batch or (of two types) in two.

    How many messages about stalls, and how many control messages of the steps after the warm-up, each rank counts.
    """

    def program(rank: int, job: Job) -> tuple[int, int]:
        counts = []
        for step in range(30):
            first = ddl.allreduce_async(np.full(4, step, np.float64), name="first", op=ddl.Sum)
            if rank == 1 and step == 20:
                late()
            second = ddl.allreduce_async(np.full(4, step, dtype), name="second", op=ddl.Sum)
            assert first.wait()[0] == 3 * step
            assert second.wait()[0] == 3 * step
            counts.append(ddl.stats()["control_messages"])
        return ddl.stats()["stall_messages"], counts[-1] - counts[10]

    with World(3, settings={"stall_warning_s": warning_s, "replay": True}) as world:
        found = world.run(program)
    return [stalls for stalls, _ in found], [control for _, control in found]


class Reported:
    """A rank that is late until somebody has said so on stderr."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.text = ""
        self._capfd = capfd

    def __call__(self) -> None:
        deadline_s = time.monotonic() + 80.0
        while "stalled" not in self.text and time.monotonic() < deadline_s:
            time.sleep(0.02)
            self.text += self._capfd.readouterr().err


def test_a_late_rank_is_named_with_what_it_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    """The others have launched the batch; the late one is in its own code, and its control thread answers. Replay goes on."""
    late = Reported(capfd)
    stalls, control = play(late, WARNING_S, np.float32)
    assert f"stalled for more than {WARNING_S:g} s in replay (epoch" in late.text, late.text
    (row,) = [line.split() for line in late.text.splitlines() if line.startswith("  allreduce.")]
    assert row[:3] == ["allreduce.second", "0,2", "1"] and float(row[3]) >= WARNING_S
    assert late.text.count("stalled") == 1
    assert stalls[0] + stalls[2] >= 2, "the alarm, and the answer or an alarm of its own"
    assert stalls[1] == 2, "asked once, answered once"
    assert control == [0, 0, 0], "a late rank is no reason to leave"


def test_a_rank_that_is_late_with_half_a_batch_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """In replay, or in the discovery to which the ranks go when a batch has been half full for long."""
    late = Reported(capfd)
    play(late, WARNING_S)
    (row,) = [line.split() for line in late.text.splitlines() if line.startswith("  allreduce.second")]
    assert row[:3] == ["allreduce.second", "0,2", "1"]


def test_steps_in_time_say_nothing() -> None:
    """No message about stalls while all keep up."""
    assert play(lambda: None, 10.0) == ([0, 0, 0], [0, 0, 0])
