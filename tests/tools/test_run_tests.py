"""What a run makes of tests that fail always, once, by a hang or by the end of their process; each in a project of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import Outcomes, run_session, verdict

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
    (line,) = run_tests.too_slow(outcomes, 1.0)
    assert line.startswith("test_more.py::test_always takes 1.5 s, more than 1.0: mark it `long`")
    run_tests.note(outcomes, tmp_path / "seconds.json")
    assert json.loads((tmp_path / "seconds.json").read_text()) == {
        "test_more.py::test_always": 1.5,
        "test_more.py::test_excused": 1.5,
    }


def test_a_slow_machine_may_take_longer() -> None:
    """The slowest tenth is no measure; a machine that is quicker than the recorded one changes nothing."""
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
