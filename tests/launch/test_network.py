"""Who left in anger, and who only because of another."""

from __future__ import annotations

import pytest

from ddlcore.launch.job.network import FailureLog
from ddlcore.messages import PROTOCOL, Bye, Register
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
    failure_log = FailureLog(coordinator)
    for rank in (1, 0, 1):
        failure_log.handle(rank, Bye(reason))
    assert failure_log.raised == ([1, 0] if cause else [])
    assert len(coordinator.heard) == 3


def test_a_rank_that_goes_on_after_its_failure_is_no_cause() -> None:
    failure_log = FailureLog(EchoCoordinator())
    failure_log.handle(1, Bye("init failed: no transport"))
    failure_log.handle(1, Register(PROTOCOL, "0.1.0", 1, 5, "no transport"))
    assert failure_log.raised == []


def test_a_rank_that_does_not_answer_is_killed_once_and_not_before_ranks_run() -> None:
    """When a stall has ended the job without it, which shows where time passes."""
    dead: dict[int, str] = {}
    killed: list[tuple[int, str]] = []
    failure_log = FailureLog(EchoCoordinator(), lambda: dead)
    dead[3] = "rank 3 does not answer"
    failure_log.overdue(0.0)
    failure_log.kill = lambda rank, why: killed.append((rank, why))
    for second in range(3):
        failure_log.overdue(float(second))
    assert killed == [(3, "rank 3 does not answer")]
