"""What a run makes of tests that fail always, once, by a hang or by the end of their process; each in a project of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tools import run_tests
from tools.run_tests import TUNABLES, Outcomes, run_session, verdict

PROGRAM = Path(run_tests.__file__)
SETTINGS = """
[pytest]
markers =
    alone: as in this repository
    long: as in this repository
    slow(reason): as in this repository
    soak: as in this repository
timeout = 20
faulthandler_timeout = 5
faulthandler_exit_on_timeout = true
"""
ONCE = """
from pathlib import Path

def first(name):
    mark = Path(__file__).with_name(name)
    was_here = mark.exists()
    mark.touch()
    return not was_here
"""
# Each body of a test, and what the run must say of it.
BODIES = {
    "fails": "assert 1 + 1 == 3",
    "fails_once": "assert not first('assert')",
    "hangs": "import time; time.sleep(100)",
    "hangs_once": "import time; time.sleep(100 * first('sleep'))",
    "hangs_in_native_code_once": "import ctypes; [ctypes.CDLL(None).pause() for _ in range(100 * first('pause'))]",
    "ends_its_process_once": "import os; first('exit') and os._exit(3)",
    "passes": "pass",
}


@pytest.fixture(autouse=True)
def _tunables_end_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` sets the variable for the sessions that it starts; it must not stay in this process."""
    monkeypatch.setenv("GLIBC_TUNABLES", os.environ.get("GLIBC_TUNABLES", ""))


def project(folder: Path, *names: str, more: str = "") -> Path:
    """Write a project with one file for each test of ``BODIES`` that is in ``names``."""
    (folder / "pytest.ini").write_text(SETTINGS)
    for name in names:
        hangs = "@pytest.mark.timeout(2)\n" if name in ("hangs", "hangs_once") else "@pytest.mark.timeout(0)\n"
        text = f"{ONCE}\nimport pytest\n\n{hangs}def test_{name}():\n    {BODIES[name]}\n"
        (folder / f"test_{name}.py").write_text(text)
    if more:
        (folder / "test_more.py").write_text(more)
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a run of the project in ``folder``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, str(PROGRAM), "--workers", "2", *arguments, "-p", "no:cacheprovider"]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=220
    )
    return done.returncode, done.stdout


def ending(output: str) -> list[str]:
    """Return the lines after the time of the run."""
    lines = output.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("run_tests: ") and line.endswith(" s")]
    return lines[at + 1 :]


@pytest.mark.long
@pytest.mark.processes
def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    """By an assertion, or by a time limit."""
    code, output = run(project(tmp_path, "fails", "hangs", "passes"))
    assert code == 1, output
    lines = ending(output)
    assert lines[:4] == [
        "failed, also alone in a new process",
        "  test_fails.py::test_fails",
        "      assert (1 + 1) == 3",
        "  test_hangs.py::test_hangs",
    ]
    assert "Timeout" in lines[4]
    assert lines[5:] == ["1 passed, 2 failed"]
    assert output.count("def test_fails") == 2, "both runs show the failure"


@pytest.mark.long
@pytest.mark.processes
def test_what_fails_once_is_unstable(tmp_path: Path) -> None:
    """By an assertion, by a time limit, by a hang in native code, and by the end of the process; the run passes."""
    names = ("fails_once", "hangs_once", "hangs_in_native_code_once", "ends_its_process_once")
    code, output = run(project(tmp_path, *names, "passes"))
    assert code == 0, output
    lines = ending(output)
    assert lines[0] == "unstable: failed once, and passed alone in a new process"
    assert lines[1:-1:2] == [f"  test_{name}.py::test_{name}" for name in sorted(names)]
    crashed, failed, stuck, slow = lines[2:-1:2]
    assert "crashed" in crashed and "crashed" in stuck
    assert failed.strip().startswith("AssertionError: assert not True") or "assert not True" in failed
    assert "Timeout" in slow
    assert lines[-1] == "5 passed, 0 failed"


@pytest.mark.long
@pytest.mark.processes
def test_a_run_goes_on_after_a_worker_has_crashed(tmp_path: Path) -> None:
    """Also if the worker has finished many files before: they are not given out again."""
    project(tmp_path, "ends_its_process_once")
    for name in "abcdefghijklmnop":
        (tmp_path / f"test_{name}.py").write_text("import time\n\ndef test_it():\n    time.sleep(0.05)\n")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(PROGRAM.parents[1])!r})\n"
        "from tools.file_scheduling import pytest_xdist_make_scheduler\n"
    )
    (tmp_path / "test_ends_its_process_once.py").rename(tmp_path / "test_o_ends.py")
    code, output = run(tmp_path)
    assert code == 0, output
    assert ending(output)[-1] == "17 passed, 0 failed"


@pytest.mark.parametrize(
    ("tier", "given", "wanted"),
    [("quick", None, TUNABLES["quick"]), ("quick", "of the user", "of the user"), ("long", None, None)],
)
def test_use_of_freed_memory_shows(
    tier: str, given: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the quick tests, the C library fills memory that is freed, unless the user has told it something else."""
    seen = []

    def session(arguments: Sequence[str], outcomes: Outcomes) -> None:
        seen.append(os.environ.get("GLIBC_TUNABLES"))
        outcomes.passed.add("test_it")

    monkeypatch.setattr(run_tests, "run_session", session)
    monkeypatch.delenv("GLIBC_TUNABLES")
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    assert run_tests.main(["--tier", tier]) == 0
    assert seen == [wanted] * 2


def test_more_unstable_tests_than_allowed_fail_the_run() -> None:
    outcomes = Outcomes(passed={"a", "b"}, unstable={"a": "no", "b": "never"})
    assert [verdict(outcomes, most)[0] for most in (None, 2, 1, 0)] == [0, 0, 1, 1]
    assert verdict(outcomes, 2)[1][0] == "unstable: failed once, and passed alone in a new process"
    assert verdict(outcomes, 1)[1][0].endswith("; more than 1 fail the run")


MARKED = """
import os, pytest

@pytest.mark.alone
def test_alone():
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"

def test_shared():
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "2"

@pytest.mark.soak
def test_soak():
    assert False

@pytest.mark.long
@pytest.mark.alone
def test_long():
    pass

@pytest.mark.skip(reason="it may")
def test_skipped():
    assert False
"""


@pytest.mark.long
@pytest.mark.processes
def test_tests_that_measure_times_run_by_themselves(tmp_path: Path) -> None:
    """Those of `make soak` do not run, those of `make test-long` only there, and skipped tests are counted."""
    code, output = run(project(tmp_path, more=MARKED), "--seconds", "seconds.json")
    assert code == 0, output
    assert ending(output) == ["2 passed, 0 failed, 1 skipped"]
    assert json.loads((tmp_path / "seconds.json").read_text()) == {}, "none has taken a second"
    code, output = run(tmp_path, "--tier", "long")
    assert code == 0, output
    assert ending(output) == ["1 passed, 0 failed"]


SLOW = """
import time, pytest

def test_always():
    time.sleep(1.5)

def test_once():
    from pathlib import Path
    mark = Path(__file__).with_name("mark")
    time.sleep(0.0 if mark.exists() else 1.5)
    mark.touch()

@pytest.mark.slow("it has a reason")
def test_excused():
    time.sleep(1.5)
"""


@pytest.mark.long
@pytest.mark.processes
def test_what_takes_too_long_twice_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is marked with a reason; the time counts that it takes alone, if that is less."""
    monkeypatch.chdir(project(tmp_path, more=SLOW))
    outcomes = Outcomes()
    run_session(["-p", "no:cacheprovider"], outcomes)
    ((line,), _) = run_tests.too_slow(outcomes, 1.0)
    assert line.startswith("test_more.py::test_always takes 1.5 s, more than 1.0: mark it `long`")
    run_tests.note(outcomes, tmp_path / "seconds.json")
    assert json.loads((tmp_path / "seconds.json").read_text()) == {
        "test_more.py::test_always": 1.5,
        "test_more.py::test_excused": 1.5,
    }


def test_a_slow_machine_may_take_longer() -> None:
    """The slowest tenth of the tests does not count, and a quicker machine does not make the limit smaller."""
    known = {f"test_{number}": 2.0 for number in range(40)}
    taken = dict.fromkeys(known, 5.0) | {"test_new": 100.0, "test_3": 200.0}
    assert run_tests.slowness(taken, known) == 2.5
    assert run_tests.slowness(dict.fromkeys(known, 1.0), known) == 1.0
    assert run_tests.slowness(dict(list(taken.items())[:5]), known) == 1.0  # too few to tell


def test_a_run_without_tests_fails() -> None:
    assert verdict(Outcomes(skipped={"a"}), None) == (1, ["broken: no test has run", "0 passed, 0 failed, 1 skipped"])


FINISH = """
def pytest_sessionfinish(session):
    session.exitstatus = {code}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"test_more.py": "def test_it(:"}, "test_more.py cannot be collected: "),
        ({"conftest.py": FINISH.format(code=1)}, "pytest failed, and no test did: "),
        (
            {"conftest.py": FINISH.format(code=13), "test_more.py": "def test_it(): assert 0"},
            "pytest ended with exit code 13: ",
        ),
    ],
    ids=["collection", "session", "session beside a test"],
)
def test_a_session_that_fails_without_a_test_fails_the_run(
    files: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read is no unstable test; a session that has left a process behind has failed."""
    for name, text in files.items():
        (project(tmp_path, "passes") / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    outcomes = Outcomes()
    run_session(["-p", "no:cacheprovider"], outcomes)
    assert any(line.startswith(words) for line in outcomes.broken), outcomes
    outcomes.failed.clear()  # as if it had passed the second time
    assert verdict(outcomes, None)[0] == 1


@pytest.mark.long
@pytest.mark.processes
def test_a_pytest_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its children."""
    hangs = "import subprocess, time\ndef pytest_sessionfinish():\n    subprocess.run(['sleep', '98.76'])\n"
    project(tmp_path, "passes")
    (tmp_path / "conftest.py").write_text(hangs)
    monkeypatch.chdir(tmp_path)
    outcomes = Outcomes()
    run_session(["-p", "no:cacheprovider"], outcomes, 8.0)
    assert outcomes.broken[0].startswith("pytest did not end within 8 s")
    assert outcomes.passed == {"test_passes.py::test_passes"}, "what it had reported counts"
    assert verdict(outcomes, None)[0] == 1
    deadline_s = time.monotonic() + 20.0
    while subprocess.run(["pgrep", "-f", "sleep 98.76"], capture_output=True).stdout:
        assert time.monotonic() < deadline_s, "its child lives"
        time.sleep(0.05)


def test_too_many_failures_do_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Outcomes(passed={"z"}, failed={f"test_{number}": "no" for number in range(run_tests.MOST_AGAIN + 1)})
    monkeypatch.setattr(run_tests, "run_session", lambda *arguments: pytest.fail("it runs again"))
    run_tests.look_again(outcomes)
    code, lines = verdict(outcomes, None)
    assert code == 1
    assert lines[-2].endswith("too many to run each of them again")


# --- the same without pytest: sessions are functions of the test, or a shell script stands in for pytest

Session = Callable[[Sequence[str], Outcomes], None]


def replace_sessions(monkeypatch: pytest.MonkeyPatch, session: Session) -> list[list[str]]:
    """Let ``session`` fill the outcomes instead of pytest. Return the list of the arguments of all sessions."""
    given: list[list[str]] = []

    def run_session(arguments: Sequence[str], outcomes: Outcomes, limit_s: float = 0.0) -> int:
        given.append([*arguments])
        session(arguments, outcomes)
        return 0

    monkeypatch.setattr(run_tests, "run_session", run_session)
    return given


def replace_pytest(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let the shell commands of ``script`` run instead of pytest. They write the reports to the file "$log"."""
    path = folder / "stand-in"
    path.write_text(f"#!/bin/sh\nlog=${{3#--report-log=}}\n{script}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def report(test: str, when: str, outcome: str, duration: float = 0.1, longrepr: object = None, marks: str = "") -> str:
    """Return a line of pytest-reportlog about one phase of a test."""
    facts = {"nodeid": test, "when": when, "outcome": outcome, "duration": duration, "longrepr": longrepr}
    return json.dumps({"$report_type": "TestReport", **facts, "keywords": dict.fromkeys(marks.split(), 1)})


def written(*lines: str) -> str:
    """Return a shell command that writes these lines to the log. The last line does not end with a line break."""
    return "".join(f"cat >> $log <<'END'\n{line}\nEND\n" for line in lines[:-1]) + f"printf %s '{lines[-1]}' >> $log\n"


def test_only_what_passes_alone_is_unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed test runs alone. It stays failed if it fails again, is skipped, does not run or breaks its session."""

    def second(arguments: Sequence[str], outcomes: Outcomes) -> None:
        test = arguments[0]
        if test in ("test_once", "test_breaks", "test_fails_at_its_end"):
            outcomes.passed.add(test)
        if test in ("test_again", "test_fails_at_its_end"):
            outcomes.failed[test] = "another error"
        if test == "test_breaks":
            outcomes.broken.append("pytest ended with exit code 13")
        if test == "test_skips":
            outcomes.skipped.add(test)

    first = {f"test_{name}": f"error of {name}" for name in ("again", "once", "breaks", "skips", "vanishes")}
    first["test_fails_at_its_end"] = "error of its end"
    outcomes = Outcomes(passed={"test_good"}, failed=dict(first))
    given = replace_sessions(monkeypatch, second)
    run_tests.look_again(outcomes)
    assert given == [[test, "-m", ""] for test in first], "each runs once, alone, whatever its marks are"
    assert outcomes.unstable == {"test_once": "error of once"}
    assert outcomes.failed == {test: error for test, error in first.items() if test != "test_once"}
    assert (outcomes.passed, outcomes.broken) == ({"test_good", "test_once"}, [])
    code, lines = verdict(outcomes, None)
    assert code == 1
    assert lines[:5] == [
        "unstable: failed once, and passed alone in a new process",
        "  test_once",
        "      error of once",
        "failed, also alone in a new process",
        "  test_again",
    ]
    outcomes.failed.clear()
    assert verdict(outcomes, None)[0] == 0


@pytest.mark.processes
def test_the_log_of_a_session_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails in its setup or teardown has failed. Of two runs, the quicker one counts as its time."""
    crash = {"reprcrash": {"message": "assert 1 == 2\nmore"}}
    lines = [
        *(report("test_good", when, "passed", 0.5) for when in ("setup", "call", "teardown")),
        report("test_slow", "call", "passed", 3.0, marks="slow test_slow"),
        report("test_bad", "call", "failed", longrepr=crash),
        report("test_setup", "setup", "failed", longrepr="E no such fixture"),
        report("test_end", "call", "passed"),
        report("test_end", "teardown", "failed", longrepr="left a process"),
        report("test_skips", "setup", "skipped", longrepr=["file", 1, "it may"]),
    ]
    replace_pytest(tmp_path, monkeypatch, written(*lines) + "exit 1\n")
    outcomes = Outcomes(seconds={"test_good": 0.25, "test_slow": 9.0})
    assert run_session([], outcomes) == 1
    assert outcomes.passed == {"test_good", "test_slow"}
    assert outcomes.failed == {
        "test_bad": "assert 1 == 2",
        "test_setup": "E no such fixture",
        "test_end": "left a process",
    }
    assert (outcomes.skipped, outcomes.excused, outcomes.broken) == ({"test_skips"}, {"test_slow"}, [])
    assert outcomes.seconds["test_good"] == 0.25 and outcomes.seconds["test_slow"] == 3.0


@pytest.mark.processes
def test_a_session_that_dies_amid_a_test_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported before counts. The test that was running has neither passed nor failed."""
    half = report("test_second", "call", "passed")[:60]
    lines = [report("test_first", "call", "passed"), report("test_second", "setup", "passed"), half]
    replace_pytest(tmp_path, monkeypatch, written(*lines) + "kill -KILL $$\n")
    outcomes = Outcomes()
    assert run_session(["-x"], outcomes) == -9
    assert (outcomes.passed, outcomes.failed) == ({"test_first"}, {})
    assert outcomes.broken == ["pytest ended with exit code -9: -x"]
    assert verdict(outcomes, None)[0] == 1


@pytest.mark.processes
def test_the_end_of_a_worker_is_a_failure_of_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist reports such a test in a phase "???"."""
    crashed = report("test_it", "???", "failed", 0.0, "worker gw0 crashed")
    replace_pytest(tmp_path, monkeypatch, written(report("test_it", "setup", "passed"), crashed) + "exit 1\n")
    outcomes = Outcomes()
    run_session([], outcomes)
    assert (outcomes.failed, outcomes.broken) == ({"test_it": "worker gw0 crashed"}, [])


@pytest.mark.processes
def test_a_session_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails the run, and what it had reported counts."""
    begins = f"sleep 600 &\necho $! > {tmp_path}/child\n" + written(report("test_good", "call", "passed"))
    replace_pytest(tmp_path, monkeypatch, begins + "wait\n")
    outcomes = Outcomes()
    assert run_session(["-x"], outcomes, 0.5) == -9
    assert outcomes.broken[0] == "pytest did not end within 0.5 s: -x"
    assert outcomes.passed == {"test_good"} and verdict(outcomes, None)[0] == 1
    child, deadline_s = int((tmp_path / "child").read_text()), time.monotonic() + 20.0
    while is_running(child):
        assert time.monotonic() < deadline_s, "its child is running"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


MARKS = [set(marks) for count in range(4) for marks in itertools.combinations(("alone", "long", "soak"), count)]


def are_selected(expression: str, marks: set[str]) -> bool:
    """Return whether pytest would select a test with these marks. The expression is one of Python, too."""
    return bool(eval(expression, {}, {name: name in marks for name in ("alone", "long", "soak")}))


@pytest.mark.parametrize(("tier", "is_long"), [([], False), (["--tier", "quick"], False), (["--tier", "long"], True)])
def test_each_test_runs_once_and_in_its_tier(tier: list[str], is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with the mark ``alone`` run with one worker, after the others. Tests with the mark ``soak`` never run."""

    def session(arguments: Sequence[str], outcomes: Outcomes) -> None:
        outcomes.passed.add("test_it")

    given = replace_sessions(monkeypatch, session)
    assert run_tests.main([*tier, "--workers", "3", "tests/tools", "-x"]) == 0
    shared, alone = given
    for marks in MARKS:
        wanted = [] if "soak" in marks or ("long" in marks) != is_long else ["1" if "alone" in marks else "3"]
        chosen = [words[words.index("-n") + 1] for words in given if are_selected(words[words.index("-m") + 1], marks)]
        assert chosen == wanted, marks
    assert shared[-2:] == alone[-2:] == ["tests/tools", "-x"]
    assert alone[alone.index("-m") + 1].startswith("alone and "), "conftest.py imports fewer files because of this"


def test_all_sessions_count_for_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failure in the second session, a failure that was unstable, and a slow test."""

    def exit_codes(second: str) -> list[int]:
        def session(arguments: Sequence[str], outcomes: Outcomes) -> None:
            outcomes.seconds["test_shared"] = 5.0
            if arguments[0] == "test_alone":  # once more
                outcomes.passed |= {"test_alone"} if second == "passes" else set()
            elif "not alone" in " ".join(arguments):
                outcomes.passed.add("test_shared")
            elif arguments[0] == "-m":
                outcomes.failed["test_alone"] = "no"

        replace_sessions(monkeypatch, session)
        options = [[], ["--max-unstable", "0"], ["--most-s", "4"], ["--most-s", "1"]]
        return [run_tests.main([*words, "--seconds", str(tmp_path / "seconds.json")]) for words in options]

    monkeypatch.setattr(run_tests, "recorded", dict)
    assert exit_codes("fails") == [1, 1, 1, 1]
    assert exit_codes("passes") == [0, 1, 0, 1]
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"test_shared": 5.0}


def test_a_test_that_is_slow_twice_needs_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slow test runs once more, alone. Tests that have failed, or have the mark ``slow``, do not count."""

    def second(arguments: Sequence[str], outcomes: Outcomes) -> None:
        outcomes.seconds["test_once"] = 0.5

    seconds = {
        "test_always": 2.5,
        "test_far_beyond": 3.5,
        "test_once": 1.5,
        "test_excused": 9.0,
        "test_failed": 9.0,
        "test_at_limit": 1.0,
    }
    passed = set(seconds) - {"test_failed"}
    outcomes = Outcomes(passed=passed, failed={"test_failed": "no"}, seconds=seconds, excused={"test_excused"})
    given = replace_sessions(monkeypatch, second)
    lines, failing = run_tests.too_slow(outcomes, 1.0)
    assert lines == [
        f"test_{name} takes {seconds} s, more than 1.0: mark it `long`, or `slow` with the reason"
        for name, seconds in (("always", 2.5), ("far_beyond", 3.5))
    ]
    assert failing == lines[1:]  # more than three times the limit
    assert given == [[test, "-m", ""] for test in ("test_always", "test_far_beyond", "test_once")]


def test_the_seconds_of_tests_that_have_not_run_stay(tmp_path: Path) -> None:
    """Those of tests that have become quick go, and those of failed tests are not written."""
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"test_other": 7.0, "test_now_quick": 7.0, "test_failed": 7.0}))
    seconds = {"test_new": 1.04, "test_now_quick": 0.9, "test_failed": 99.0}
    run_tests.note(Outcomes(passed={"test_new", "test_now_quick"}, failed={"test_failed": "no"}, seconds=seconds), file)
    assert json.loads(file.read_text()) == {"test_failed": 7.0, "test_new": 1.0, "test_other": 7.0}
