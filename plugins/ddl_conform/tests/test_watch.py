"""What ``ddl conform`` makes of a child process that crashes, hangs or says nothing: a shell script stands in for it."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ddl_conform.conform.child import _Teller
from ddl_conform.conform.kinds import ProviderUnderTest, subjects
from ddl_conform.conform.watch import RESTARTS, conform

from ddlcore.plug.settings import settings_of

LINES = """
order=$3
words=$(dirname "$order")/words
done=$(grep -o '"done": [[][^]]*' "$order")
say() { printf '%s\\n' "$1" >> "$words"; }
is_done() { case "$done" in *'"'"$1"'"'*) ;; *) false ;; esac; }
begin() { say '{"begin": "'"$1"'"}'; }
end() { say '{"end": {"name": "'"$1"'", "seconds": 0.1, "outcome": "passed"}}'; }
"""


@pytest.fixture
def subject() -> ProviderUnderTest:
    """A plugin that has a suite. The stand-in runs none of its tests."""
    (found,) = subjects(settings_of({})[1], "threshold")
    return found


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``stand_in(script)``: these shell commands run instead of the child process."""

    def replace(script: str) -> None:
        path = tmp_path / "stand-in"
        path.write_text(f"#!/bin/sh\n{LINES}{script}")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.mark.processes
def test_after_a_crash_and_a_hang_the_other_tests_run(
    subject: ProviderUnderTest, stand_in: Any, tmp_path: Path
) -> None:
    """Each of both fails its own test. What a test has started ends with its process."""
    stand_in(f"""
        say '{{"collected": ["test_first", "test_crash", "test_hang", "test_last"]}}'
        for test in test_first test_crash test_hang test_last; do
            is_done $test && continue
            begin $test
            case $test in
                test_first) sleep 600 & echo $! > {tmp_path}/child ;;
                test_crash) echo its last words; kill -ABRT $$ ;;
                test_hang) echo "Timeout (0:00:01)!"; exit 1 ;;
            esac
            end $test
        done
    """)
    told: list[tuple[int, int, str]] = []
    run = conform(subject, test_s=1.0, told=lambda *one: told.append(one))
    assert run.refused == ""
    assert {result.name: (result.outcome, result.reason) for result in run.results} == {
        "test_first": ("passed", ""),
        "test_crash": ("failed", "it ended the process by signal SIGABRT"),
        "test_hang": ("failed", "it was not over in time; its process was ended"),
        "test_last": ("passed", ""),
    }
    assert run.results[1].detail == "its last words\n"
    assert told == [(0, 4, "test_first"), (1, 4, "test_crash"), (2, 4, "test_hang"), (3, 4, "test_last")]
    child, deadline_s = int((tmp_path / "child").read_text()), time.monotonic() + 20.0
    while is_running(child):
        assert time.monotonic() < deadline_s, "what the first test has started is running"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.processes
def test_after_too_many_crashes_the_rest_is_not_run(subject: ProviderUnderTest, stand_in: Any) -> None:
    """These tests have not failed, and say why they have not run."""
    names = [f"test_{letter}" for letter in "abcdefghijkl"]
    stand_in(f"""
        say '{json.dumps({"collected": names})}'
        for test in {" ".join(names)}; do
            is_done $test && continue
            begin $test
            exit 3
        done
    """)
    run = conform(subject, test_s=1.0)
    outcomes = {result.name: (result.outcome, result.reason) for result in run.results}
    crashed, rest = names[: RESTARTS + 1], names[RESTARTS + 1 :]
    assert outcomes == {
        **dict.fromkeys(crashed, ("failed", "it ended the process with code 3")),
        **dict.fromkeys(rest, ("not run", f"{len(crashed)} tests before it hung or ended their process")),
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no such option; exit 4", "pytest ended with code 4: no such option"),
        ("begin test_a; end test_a; echo at its end; exit 5", "pytest ended with code 5: at its end"),
        ("""say '{"refused": "no suite"}'""", "no suite"),
    ],
)
def test_a_session_that_fails_beside_its_tests_is_refused(
    script: str, reason: str, subject: ProviderUnderTest, stand_in: Any
) -> None:
    """No test is blamed for it, and no other process is started."""
    stand_in(script)
    run = conform(subject, test_s=1.0)
    assert run.refused == reason
    assert [result.outcome for result in run.results] in ([], ["passed"])


@pytest.mark.processes
def test_a_test_that_passes_and_fails_in_its_teardown_has_failed(subject: ProviderUnderTest, stand_in: Any) -> None:
    failure = {"name": "test_a", "seconds": 0.1, "outcome": "failed", "phase": "teardown", "reason": "it left a file"}
    stand_in(f"begin test_a\nend test_a\nsay '{json.dumps({'end': failure})}'")
    (result,) = conform(subject, test_s=1.0).results
    assert (result.outcome, result.reason) == ("failed", "in teardown: it left a file")


def test_each_test_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process ends itself if a test takes longer. It says first which test begins."""
    calls: list[tuple[object, ...]] = []
    words, stderr = io.StringIO(), io.StringIO()

    def begin(seconds: float, *, exit: bool, file: object) -> None:
        calls.append((words.getvalue(), seconds, exit, file))

    item: Any = type("Item", (), {"nodeid": "test_conform.py::TestSuite::test_it[1]"})
    around = _Teller(words, stderr, {"only": [], "done": [], "test_s": 12.0}).pytest_runtest_protocol(item)
    with monkeypatch.context() as patch:
        patch.setattr(faulthandler, "dump_traceback_later", begin)
        patch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append(("over",)))
        next(around)
        assert calls == [('{"begin": "test_it[1]"}\n', 12.0, True, stderr)]
        with pytest.raises(StopIteration):
            around.send(None)
    assert calls[1:] == [("over",)]
