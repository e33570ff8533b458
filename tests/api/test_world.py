"""Who may call init, and when a rank leaves whose main thread has ended while other threads run."""

from __future__ import annotations

import os
from typing import cast

import pytest

import ddlcore
from ddlcore.api import ending
from ddlcore.config.table import CHILD_MARK
from ddlcore.errors import DdlInternalError
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job


def test_a_child_of_a_rank_may_not_call_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the variables of its parent, and would take the place of this rank."""
    monkeypatch.setenv(CHILD_MARK, "5")
    with pytest.raises(
        DdlInternalError, match=r"^init\(\) was called in a process that a rank \(process 5\) has started"
    ):
        ddlcore.init()
    assert not ddlcore.is_initialized()


def test_only_children_of_a_launched_rank_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may call init again, because it is not its own child process. A world of one rank may start ranks."""
    monkeypatch.setenv(CHILD_MARK, "")  # so that it is removed after the test
    monkeypatch.delenv(CHILD_MARK)
    monkeypatch.delenv("DDL_JOB_FILE", raising=False)
    Environment.mark_children(True)
    assert CHILD_MARK not in os.environ, "no launcher has started this process"
    Environment.mark_children(True, external=True)
    assert os.environ[CHILD_MARK] == str(os.getpid()) and Environment.child_of() == ""
    Environment.mark_children(False)
    assert CHILD_MARK not in os.environ
    monkeypatch.setenv(CHILD_MARK, "5")
    Environment.mark_children(False)
    assert Environment.child_of() == "5", "the mark of a parent stays"


def test_init_and_shutdown_mark_the_children_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """From init on, until shutdown: then a child may be started that is a rank of its own."""
    marks: list[bool] = []
    monkeypatch.setattr(Environment, "mark_children", lambda on, external=False: marks.append(on))
    ddlcore.init()
    ddlcore.shutdown()
    assert marks == [True, False]


# --- after the end of the main thread


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Training:
    """The job of a rank whose main thread has ended. Another thread makes a collective every ``step_s``, or computes."""

    def __init__(self, clock: Clock, step_s: float, waits: bool, steps: int) -> None:
        self._clock, self._step_s, self._waits = clock, step_s, waits
        self._begun_s, self._end_s = clock.now_s, clock.now_s + steps * step_s
        self.reasons: list[str] = []
        self.settings = self
        self.lookout = self

    def number(self, name: str) -> float:
        return {"leave_timeout_s": 5.0}[name]

    def progress(self) -> int:
        return int((self._clock.now_s - self._begun_s) / self._step_s)

    def pending(self) -> list[str]:
        return ["allreduce.x"] if self._waits else []

    @property
    def closed(self) -> bool:
        return bool(self.reasons) or self._clock.now_s >= self._end_s

    def shutdown(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(
    ("step_s", "waits", "left"),
    [(4.5, True, False), (60.0, False, False), (60.0, True, True)],
    ids=["a collective completes now and then", "the thread computes", "a collective never completes"],
)
def test_a_thread_that_the_main_thread_has_left_is_cut_off_only_if_it_hangs(
    step_s: float, waits: bool, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may leave its training to a thread, and end: the training goes on, however long it takes."""
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    training = Training(clock, step_s, waits, steps=20)
    ending._watch_threads(cast(Job, training))
    if left:
        (reason,) = training.reasons
        assert "waited for 'allreduce.x', which did not come within 5 s (DDL_LEAVE_TIMEOUT_S)" in reason
        assert 5.0 < clock.now_s - 100.0 < 5.5
    else:
        assert training.reasons == []
        assert clock.now_s >= 100.0 + 20 * step_s
