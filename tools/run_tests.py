"""Run the tests, and run each test that has failed once more: alone, in a new process.

    python tools/run_tests.py [--tier long] [--max-unstable N] [--most-s S] [--seconds FILE] [arguments of pytest …]

A test that fails again fails the run. A test that passes the second time is unstable: the run lists it at the end with
its first error. Such a test is a bug, in the test or in what it tests, but it says nothing about the last change. The
second run never uses the process of the first one, because a test may fail only after certain others, and the process
that shows a defect is not the one to acquit it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Outcomes", "main", "run_session", "verdict"]

# The mark expression of pytest that selects the tests of each tier.
TIERS = {"quick": "not long and not soak", "long": "long and not soak"}
# Tests that measure times have the machine for themselves. One worker, not none: if a test ends its process, pytest
# reports that test, and continues with the others in a new worker.
SHARED, ALONE = "not alone", "alone"
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
ANY_MARK = ("-m", "")  # the mark expression of the first run has chosen the test already
MOST_AGAIN = 20  # failures that are looked at twice; if there are more, something is wrong with all of them
RECORDED = Path(__file__).resolve().parents[1] / "tests" / "seconds.json"
SESSION_LIMIT_S = 4500.0  # pytest ends tests that hang; this ends a pytest that hangs
AGAIN_LIMIT_S = 1000.0  # more than pytest's own limit for a test in native code
# The C library fills memory that is freed with bytes 0xA5, and does not keep small pieces beside that: then reading a
# freed address fails at once, in every run. Without it, such a defect shows once in a hundred runs, far from its place.
# The long tests run without it. In one of them, strangers make a server allocate gigabytes of memory, which the server
# never uses. Filling this memory would take all of the server's time.
TUNABLES = {"quick": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}
LINE = 200  # the most characters of an error in the list


@dataclass
class Outcomes:
    """What pytest has reported of the tests of one run: ``failed`` and ``unstable`` have the first error of each."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    unstable: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # what no single test has done; each line fails the run
    seconds: dict[str, float] = field(default_factory=dict)  # of each test, from its setup to its teardown
    excused: set[str] = field(default_factory=set)  # tests with the mark `slow`, which states a reason

    def read(self, log: Path) -> None:
        """Add the reports in ``log``, which pytest-reportlog has written, one JSON object in a line."""
        for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
            try:
                report: dict[str, Any] = json.loads(line)
            except ValueError:  # the line that pytest was writing when it was killed
                continue
            self._add(report)

    def _add(self, report: dict[str, Any]) -> None:
        test, outcome = report.get("nodeid", ""), report.get("outcome")
        if report["$report_type"] == "CollectReport" and outcome == "failed":
            self.broken.append(f"{test} cannot be collected: {_error(report)}")
        if report["$report_type"] != "TestReport":
            return
        self.seconds[test] = self.seconds.get(test, 0.0) + report["duration"]
        if "slow" in report["keywords"]:
            self.excused.add(test)
        if outcome == "failed":  # in its setup, its call or its teardown
            self.failed.setdefault(test, _error(report))
        elif outcome == "skipped":
            self.skipped.add(test)
        elif report["when"] == "call":
            self.passed.add(test)


def _error(report: dict[str, Any]) -> str:
    """Return the first line of a report's error."""
    told = report.get("longrepr")
    text = told["reprcrash"]["message"] if isinstance(told, dict) and told.get("reprcrash") else str(told)
    return next(iter(text.strip().splitlines()), "no message")[:LINE]


def run_session(arguments: Sequence[str], outcomes: Outcomes, limit_s: float = SESSION_LIMIT_S) -> int:
    """Run pytest in a new process, add what it reports to ``outcomes``, and return its exit code.

    All temporary files of the session are in a folder that is removed with it. A session that does not end within
    ``limit_s`` seconds is killed with everything it has started, and counts as broken; so does a session that fails
    although no test has failed.
    """
    # A short name: the paths of Unix sockets below it may have 108 characters. A process that a test has left behind may
    # still write there, which must not hide the result.
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "reports.jsonl"
        command = [sys.executable, "-m", "pytest", f"--report-log={log}", f"--basetemp={folder}/p", *arguments]
        process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TMPDIR": folder})
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = _end(process, signal.SIGKILL)
            outcomes.broken.append(f"pytest did not end within {limit_s:g} s: {' '.join(arguments)}")
        except KeyboardInterrupt:  # the terminal does not tell it, because it has a session of its own
            _end(process, signal.SIGINT)
            raise
        found = Outcomes()
        found.read(log)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED):
        outcomes.broken.append(f"pytest ended with exit code {code}: {' '.join(arguments)}")
    elif code == pytest.ExitCode.TESTS_FAILED and not found.failed and not found.broken:
        outcomes.broken.append(f"pytest failed, and no test did: {' '.join(arguments)}")
    outcomes.broken += found.broken
    outcomes.passed |= found.passed - found.failed.keys()
    outcomes.skipped |= found.skipped - found.failed.keys()
    outcomes.failed |= found.failed
    outcomes.excused |= found.excused
    for test, seconds in found.seconds.items():  # of a test that runs twice, the quicker run counts
        outcomes.seconds[test] = min(seconds, outcomes.seconds.get(test, seconds))
    return code


def _end(process: subprocess.Popen[bytes], number: int, grace_s: float = 30.0) -> int:
    """Send the signal ``number`` to all processes of the session, and kill what remains after ``grace_s`` seconds."""
    os.killpg(process.pid, number)
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def look_again(outcomes: Outcomes, limit_s: float = AGAIN_LIMIT_S) -> None:
    """Run each failed test alone in a new process, and move those that pass from ``failed`` to ``unstable``."""
    if len(outcomes.failed) > MOST_AGAIN:
        outcomes.broken.append(f"{len(outcomes.failed)} tests failed: too many to run each of them again")
        return
    for test, error in list(outcomes.failed.items()):
        print(f"\nrun_tests: {test} has failed; it runs again, alone:", flush=True)
        second = Outcomes()
        run_session([test, *ANY_MARK], second, limit_s)
        if test in second.passed and not second.failed and not second.broken:
            del outcomes.failed[test]
            outcomes.unstable[test] = error
            outcomes.passed.add(test)


def slowness(taken: Mapping[str, float], known: Mapping[str, float]) -> float:
    """Return a factor, at least 1: nine of ten tests take at most this many times the seconds that ``known`` says.

    Limits are multiplied by it, so that no test fails because the machine is slower or has other work. If fewer than 20
    tests can be compared, the factor is 1.
    """
    ratios = sorted(taken[test] / known[test] for test in taken.keys() & known.keys())
    return max(1.0, ratios[int(0.9 * len(ratios))]) if len(ratios) >= 20 else 1.0


def recorded() -> dict[str, float]:
    """Return the seconds of tests/seconds.json."""
    seconds: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return seconds


def too_slow(outcomes: Outcomes, most_s: float) -> tuple[list[str], list[str]]:
    """Run each test that has taken more than ``most_s`` seconds once more, alone.

    Return two lists: a line for each test that takes too long again, and of these lines those that fail the run, because
    the test takes more than three times as long. A test with the mark ``slow`` may take longer.

    A test that waits for a fixed time is near the limit on one machine and beyond it on another. So the limit alone
    fails no run.
    """
    tests = sorted(outcomes.passed & outcomes.seconds.keys() - outcomes.excused)
    for test in [test for test in tests if outcomes.seconds[test] > most_s]:
        print(f"\nrun_tests: {test} has taken {outcomes.seconds[test]:.1f} s; it runs again, alone:", flush=True)
        run_session([test, *ANY_MARK], outcomes, AGAIN_LIMIT_S)
    lines = {
        test: f"{test} takes {outcomes.seconds[test]:.1f} s, more than {most_s:.1f}: "
        "mark it `long`, or `slow` with the reason"
        for test in tests
        if outcomes.seconds[test] > most_s
    }
    return list(lines.values()), [line for test, line in lines.items() if outcomes.seconds[test] > 3 * most_s]


def note(outcomes: Outcomes, file: Path, least_s: float = 1.0) -> None:
    """Write into ``file`` how many seconds each test of this run has taken, if at least ``least_s`` seconds.

    Lines about tests that have not run stay in the file.
    """
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known |= {test: round(seconds, 1) for test, seconds in outcomes.seconds.items() if test in outcomes.passed}
    kept = {test: seconds for test, seconds in sorted(known.items()) if seconds >= least_s}
    file.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def verdict(outcomes: Outcomes, most_unstable: int | None) -> tuple[int, list[str]]:
    """Return the exit code of the run, and the lines that end its output. ``most_unstable`` None is no limit."""
    lines = []
    too_many = most_unstable is not None and len(outcomes.unstable) > most_unstable
    if outcomes.unstable:
        limit = f"; more than {most_unstable} fail the run" if too_many else ""
        lines.append(f"unstable: failed once, and passed alone in a new process{limit}")
        lines += _listed(outcomes.unstable)
    if outcomes.failed:
        lines.append("failed, also alone in a new process" if len(outcomes.failed) <= MOST_AGAIN else "failed")
        lines += _listed(outcomes.failed)
    lines += [f"broken: {line}" for line in outcomes.broken]
    if not outcomes.passed and not outcomes.failed:
        lines.append("broken: no test has run")
    code = int(bool(outcomes.failed or outcomes.broken or too_many or not outcomes.passed))
    skipped = f", {len(outcomes.skipped)} skipped" if outcomes.skipped else ""
    return code, [*lines, f"{len(outcomes.passed)} passed, {len(outcomes.failed)} failed{skipped}"]


def _listed(tests: dict[str, str]) -> list[str]:
    return [line for test, error in sorted(tests.items()) for line in (f"  {test}", f"      {error}")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests as the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )  # no abbreviations: options of pytest may begin alike
    parser.add_argument("--tier", choices=TIERS, default="quick", help="which tests run; default quick")
    parser.add_argument("--max-unstable", type=int, metavar="N", help="fail if more tests than N are unstable")
    parser.add_argument(
        "--most-s",
        type=float,
        metavar="S",
        help="list each test that takes longer, also alone, and fail if one takes three times as long; more if this machine "
        "is slower than that of tests/seconds.json",
    )
    parser.add_argument(
        "--seconds", type=Path, metavar="FILE", help="write into this JSON file how long tests have taken"
    )
    parser.add_argument(
        "--workers", type=int, default=4, metavar="N", help="tests that run at the same time; default 4"
    )
    given, rest = parser.parse_known_args(arguments)
    since_s = time.monotonic()
    outcomes = Outcomes()
    if given.tier in TUNABLES:
        os.environ.setdefault("GLIBC_TUNABLES", TUNABLES[given.tier])
    for marks, workers in ((SHARED, given.workers), (ALONE, 1)):
        run_session(["-m", f"{marks} and {TIERS[given.tier]}", "-n", str(workers), *BY_FILE, *rest], outcomes)
    look_again(outcomes)
    slow: list[str] = []
    if given.most_s is not None:
        slow, far_too_slow = too_slow(outcomes, given.most_s * slowness(outcomes.seconds, recorded()))
        outcomes.broken += far_too_slow
    if given.seconds is not None:
        note(outcomes, given.seconds)
    code, lines = verdict(outcomes, given.max_unstable)
    print(f"\nrun_tests: {time.monotonic() - since_s:.0f} s")
    print("\n".join([*(f"slow: {line}" for line in slow), *lines]), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
