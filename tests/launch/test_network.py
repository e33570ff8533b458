"""Who left in anger, and who only because of another."""

from __future__ import annotations

import pytest

from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.messages.elastic import Finished, NextWorld, Register, WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import STOP, Bye, ToCoordinator
from ddlcore.messages.to_rank import AgreedCall, Outgoing, Welcome
from tests.control.echo import EchoCoordinator


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("raised RuntimeError: boo", True),
        ("ended its script without shutdown()", True),  # sys.exit(3): it counts only if its exit code does
        ("init failed: no transport", True),
        ("init failed: rank 1 lost during init: killed", False),
        ("raised PeerLost: rank 1 lost", False),
        ("called shutdown()", False),
    ],
)
def test_a_cause_is_noted(reason: str, cause: bool) -> None:
    """Once a rank, in the order in which they left; all is handed on."""
    coordinator = EchoCoordinator()
    observed = ObservedCoordinator(coordinator)
    for rank in (1, 0, 1):
        observed.handle(rank, Bye(reason))
    assert observed.raised == ([1, 0] if cause else [])
    assert len(coordinator.heard) == 3


def test_a_rank_that_goes_on_after_its_failure_is_no_cause() -> None:
    observed = ObservedCoordinator(EchoCoordinator())
    observed.handle(1, Bye("init failed: no transport"))
    observed.handle(1, Register(PROTOCOL, "0.1.0", 1, 5, "no transport"))
    assert observed.raised == []


def test_a_rank_that_does_not_answer_is_killed_once_and_not_before_ranks_run() -> None:
    """When a stall has ended the job without it, which shows where time passes."""
    dead: dict[LaunchedRank, str] = {}
    killed: list[tuple[int, str]] = []
    observed = ObservedCoordinator(EchoCoordinator(), lambda: dead)
    dead[LaunchedRank(3)] = "rank 3 does not answer"
    observed.overdue(0.0)
    observed.kill = lambda rank, why: killed.append((rank, why))
    for second in range(3):
        observed.overdue(float(second))
    assert killed == [(3, "rank 3 does not answer")]


class Telling(EchoCoordinator):
    """A coordinator whose answers are set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Outgoing[LaunchedRank] = []

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        return self.answer


def test_agents_are_told_whatever_a_successor_must_know() -> None:
    """That a world opens, that all its members are there, that it is to stop, and that its training is complete."""
    coordinator = Telling()
    told: list[str] = []
    observed = ObservedCoordinator(coordinator, opened=told.append)
    report = WorldReport(1, 2)
    ranks = (LaunchedRank(0), LaunchedRank(1))
    steps: list[tuple[ToCoordinator, Outgoing[LaunchedRank]]] = [
        (Register(PROTOCOL, "0.1.0", 0, -1, ""), [(rank, NextWorld(1, (0, 1), (0, 0), 0, 0)) for rank in ranks]),
        (Bye("x"), [(rank, Welcome("world1", report)) for rank in ranks]),
        (Bye("x"), [(rank, AgreedCall(STOP, 0, 5, "SIGTERM")) for rank in ranks]),
        (Finished(1), []),
        (Finished(1), []),
    ]
    for message, answer in steps:
        coordinator.answer = answer
        before = len(told)
        observed.handle(0, message)
        assert len(told) - before <= 1, "once, and not for each member"
    assert told == ["", "", "SIGTERM", "SIGTERM"]
