"""A stall in replay: who waits where, who has not come, and what is missing there, said once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

import ddlcore as ddl
from ddlcore.coordinator.awaited import Details
from ddlcore.coordinator.replay_status import Busies, ReplayStatuses
from ddlcore.coordinator.stall_table import Late
from ddlcore.messages.observing import Busy, ReplayStatus
from ddlcore.messages.ranks import WorldRank
from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(240)

WARNING_S = 0.2
ALARM = ReplayStatus(3, 12, True, 0, ("a", "b"), (), True, waits_s=58.0)


def details(one: ReplayStatuses, size: int) -> Details[WorldRank]:
    """What the only wait is like now."""
    (wait,) = one.awaited(3, range(size))
    assert (wait.where, wait.waited_s) == ("in replay (epoch 3, place 12)", 58.0)
    return wait.details()


def test_all_are_asked_once_and_the_report_names_who_lacks_what() -> None:
    """By the first alarm of a bucket; the second one is an answer."""
    one = ReplayStatuses()
    assert one.hear(0, ALARM, range(4)) == [1, 2, 3]
    assert one.hear(2, ALARM, range(4)) == []
    assert details(one, 4).ranks == (1, 3), "two have not answered"
    one.hear(1, ReplayStatus(3, 12, False, 0, ("a", "b"), ("b",)), range(4))
    one.hear(3, ReplayStatus(3, 11, True, 0, ("z",)), range(4))
    assert details(one, 4) == Details(
        (1, 3),
        (Late("a", 0, (0, 1, 2), (3,), 0.0), Late("b", 0, (0, 2), (1, 3), 0.0)),
        ("rank 3: in 'z' (place 11)",),
    )
    assert one.hear(0, ALARM, range(4)) == [], "the same bucket"


def test_a_rank_that_has_not_answered_is_waited_for() -> None:
    """Its process may be stopped. A rank that has left is not."""
    one = ReplayStatuses()
    one.hear(0, ALARM, range(3))
    one.hear(2, ALARM, range(3))
    assert details(one, 3).ranks == (1,)
    assert details(one, 1).ranks == ()


def test_a_bucket_that_all_have_entered_is_the_networks() -> None:
    """Nobody is missing. A rank that has gone on was there, too."""
    one = ReplayStatuses()
    one.hear(0, ALARM, range(3))
    one.hear(1, ALARM, range(3))
    one.hear(2, ReplayStatus(3, 13, False, 0, ("z",), ("z",)), range(3))
    found = details(one, 3)
    assert found.tensors[0] == Late("a", 0, (0, 1, 2), (), 0.0)
    assert found.notes == ("every rank has entered it: the transport or the network holds it up",)
    assert found.ranks == ()


def test_ranks_of_which_the_same_is_to_be_said_share_a_line() -> None:
    """Five hundred ranks that stand one bucket behind are one line."""
    one = ReplayStatuses()
    one.hear(0, ALARM, range(501))
    for rank in range(1, 501):
        one.hear(rank, ReplayStatus(3, 11, False, 7, ("z", ""), ("z", "")), range(501))
    assert details(one, 501).notes == (
        "ranks 1-500: at place 11, without 'z', '(a call without a name)' in process set 7",
    )


def test_a_wait_that_is_over_is_none() -> None:
    """Replay was left, where the coordinator's table knows what waits; or the rank that gave the alarm has gone on."""
    one = ReplayStatuses()
    one.hear(0, ALARM, range(2))
    assert one.awaited(4, range(2)) == []
    one.hear(0, ReplayStatus(3, 11, True, 0, ("z",), moved=True), range(2))
    assert details(one, 2).ranks == (1,), "that was of an older bucket"
    one.hear(0, ReplayStatus(3, 12, True, 0, ("a", "b"), moved=True), range(2))
    assert one.awaited(3, range(2)) == []


def test_a_decided_bucket_is_waited_for_until_all_who_were_in_it_are_out() -> None:
    """Those that have not said so are missing; the root of a broadcast comes out first, and is none of them."""
    one = Busies()
    busy = Busy("allreduce 'x'", 4, 7, ("x",), 58.0)
    one.hear(0, busy)
    one.hear(2, busy)
    sets = {7: (0, 1, 2)}
    (wait,) = one.awaited(sets, range(4))
    assert (wait.where, wait.waited_s, wait.only_silent) == ("in allreduce 'x'", 58.0, False)
    assert wait.details() == Details((1,), (Late("x", 7, (0, 2), (1,), 0.0),))
    one.hear(2, structs.replace(busy, over=True))
    (wait,) = one.awaited(sets, range(4))
    assert wait.details().ranks == (1,)
    one.hear(0, structs.replace(busy, over=True))
    assert one.awaited(sets, range(4)) == []
    one.hear(0, structs.replace(busy, over=True))
    assert one.awaited(sets, range(4)) == []


def test_what_ends_by_itself_is_no_stall_while_the_ranks_answer() -> None:
    """Opening a transport, say: all members are looked at, also those that are in it."""
    one = Busies()
    one.hear(0, Busy("init()", -1, 0, (), 58.0, has_deadline=True))
    (wait,) = one.awaited({0: (0, 1)}, range(2))
    assert wait.only_silent and wait.details().ranks == (0, 1)


def play(late: Callable[[], None], warning_s: float, dtype: type = np.float64) -> tuple[list[int], list[int]]:
    """Thirty steps on three ranks; in the 20th rank 1 is ``late`` between two tensors, in one bucket or (of two types) in two.

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
    """The others have launched the bucket; the late one is in its own code, and its control thread answers. Replay goes on."""
    late = Reported(capfd)
    stalls, control = play(late, WARNING_S, np.float32)
    assert f"stalled for more than {WARNING_S:g} s in replay (epoch" in late.text, late.text
    (row,) = [line.split() for line in late.text.splitlines() if line.startswith("  allreduce.")]
    assert row[:3] == ["allreduce.second", "0,2", "1"] and float(row[3]) >= WARNING_S
    assert late.text.count("stalled") == 1
    assert stalls[0] + stalls[2] >= 2, "the alarm, and the answer or an alarm of its own"
    assert stalls[1] >= 2 and stalls[1] % 2 == 0, "asked where it is, and whether it is there; answered as often"
    assert control == [0, 0, 0], "a late rank is no reason to leave"


def test_a_rank_that_is_late_with_half_a_bucket_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """In replay, or in the discovery to which the ranks go when a bucket has been half full for long."""
    late = Reported(capfd)
    play(late, WARNING_S)
    (row,) = [line.split() for line in late.text.splitlines() if line.startswith("  allreduce.second")]
    assert row[:3] == ["allreduce.second", "0,2", "1"]


def test_steps_in_time_say_nothing() -> None:
    """No message about stalls while all keep up."""
    assert play(lambda: None, 60.0) == ([0, 0, 0], [0, 0, 0])
