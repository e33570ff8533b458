"""Runs torch's own tests of torch.distributed on the backend ddl and on Gloo, and prints where the results differ.

    python tools/torch_suite.py [--np 4] [--only PATTERN] [--limit-s 60] [--markdown FILE]

torch ships these tests in its wheel (torch.testing._internal.distributed.distributed_test). They need a package that
torch does not bring: `pip install expecttest`. They name Gloo; on ddl they run as any script that names Gloo does under
`ddl run --torch-backend ddl`. The tests that only MPI can run on CPUs run on ddl, too: torch's wheel has no MPI. Each
test has its own ranks, forked from a process that has imported torch. If a test ends that process, too, another one
goes on behind it. The exit code is 1 if a test passes on Gloo (or needs MPI), does not pass on ddl, and has no reason
in REASONS.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from tools.bench_verdicts import put

__all__ = ["REASONS", "Result", "differing", "main", "markdown", "need_mpi", "run_on"]

PASSED, FAILED, SKIPPED, ENDED = "passed", "failed", "skipped", "ended"
# In each column of the table: the backend that the tests name, and the one that they get.
GLOO, DDL, DDL_FOR_MPI = "Gloo", "ddl", "ddl instead of MPI"
NAMED = {GLOO: ("gloo", ""), DDL: ("gloo", "ddl"), DDL_FOR_MPI: ("mpi", "ddl")}

# Tests that pass on Gloo and cannot pass on ddl, by name, each with its reason.
REASONS = {"test_get_backend": "It compares the group's backend with the one that it has asked for, and that is Gloo."}


@dataclass(frozen=True)
class Result:
    """What became of one test: PASSED, FAILED, SKIPPED, or ENDED if it ended the process that ran it."""

    test: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


class _Told(unittest.TestResult):
    """Appends the result of each test to a file as soon as it is known; at the beginning of a test it is ENDED."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._begun_s = path, 0.0

    def _tell(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        name = test.id().rpartition(".")[2]
        result = Result(name, outcome, text, round(time.monotonic() - self._begun_s, 2))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun_s = time.monotonic()
        self._tell(test, ENDED)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell(test, PASSED)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._tell(test, FAILED, str(err[1]))

    addError = addFailure

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._tell(test, SKIPPED, reason)


def _suite() -> Any:
    """Return torch's class of tests, with ranks that are forked. BACKEND must be in the environment."""
    import torch
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestDistributed


def _run_here(names: Sequence[str], path: Path) -> None:
    """Run the tests ``names`` one after the other, in this process and its children."""
    suite, told = _suite(), _Told(path)
    for name in names:
        unittest.TestSuite([suite(name)]).run(told)


def _environment(column: str, size: int, limit_s: float, folder: Path) -> dict[str, str]:
    named, used = NAMED[column]
    return {
        **os.environ,
        "BACKEND": named,
        "DDL_TORCH_BACKEND": used,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": f"{limit_s:.0f}",
        "INIT_METHOD": f"file://{folder}/meeting",
        "OMP_NUM_THREADS": "1",
        "TEMP_DIR": str(folder),
        "TMPDIR": str(folder),
        "WORLD_SIZE": str(size),
    }


def run_on(column: str, names: Sequence[str], size: int, limit_s: float) -> dict[str, Result]:
    """Return the results of the tests ``names`` for a column of the table, by name. A test gets ``limit_s`` seconds."""
    results: dict[str, Result] = {}
    left = list(names)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "results"
        environ = _environment(column, size, limit_s, Path(place))
        while left:
            path.write_text("", encoding="utf-8")
            command = [sys.executable, __file__, "--here", str(path), *left]
            ended = subprocess.run(command, env=environ, capture_output=True, text=True)
            told = [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
            if not told:
                sys.exit(f"torch_suite: the tests cannot be run:\n{ended.stderr}")
            results |= {result.test: result for result in told}
            left = left[left.index(told[-1].test) + 1 :]
    return results


def differing(results: dict[str, dict[str, Result]]) -> list[Result]:
    """Return the results on ddl of the tests that pass on Gloo, or need MPI, and do not pass on ddl."""
    passed = [results[DDL][name] for name, result in sorted(results[GLOO].items()) if result.outcome == PASSED]
    return [result for result in [*passed, *results[DDL_FOR_MPI].values()] if result.outcome != PASSED]


def need_mpi(gloo: dict[str, Result]) -> list[str]:
    """Return the names of the tests that are skipped on Gloo and would run on MPI."""
    return [name for name, result in gloo.items() if result.outcome == SKIPPED and "Only MPI" in result.text]


def markdown(results: dict[str, dict[str, Result]]) -> list[str]:
    """Return the numbers of tests by backend and outcome, and below them the tests that differ, with their reasons."""
    lines = [f"| backend | {PASSED} | {FAILED} | {ENDED} the process | {SKIPPED} |", "|---|--:|--:|--:|--:|"]
    for column, rows in results.items():
        count = Counter(result.outcome for result in rows.values())
        numbers = " | ".join(str(count[outcome]) for outcome in (PASSED, FAILED, ENDED, SKIPPED))
        lines.append(f"| {column} | {numbers} |")
    different = differing(results)
    if different:
        lines += ["", "| should pass, and does not | because |", "|---|---|"]
        lines += [f"| `{result.test}` | {REASONS.get(result.test, result.outcome)} |" for result in different]
    return lines


def _names(pattern: str) -> list[str]:
    environ = _environment(GLOO, size=1, limit_s=1, folder=Path())
    listed = subprocess.run([sys.executable, __file__, "--list"], env=environ, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(
            f"torch_suite: the tests cannot be listed; do they miss a package (pip install expecttest)?\n{listed.stderr}"
        )
    return fnmatch.filter(listed.stdout.split(), pattern)


def main() -> int:
    """Run the tests and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=4, help="ranks of each test (default: 4)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="tests whose names match, such as 'test_ddp_*'")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds that a test may take (default: 60)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table into this file, between its marks")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print(*unittest.defaultTestLoader.getTestCaseNames(_suite()), sep="\n")
        return 0
    if options.here:
        _run_here(options.tests, options.here)
        return 0
    names = _names(options.only)
    results: dict[str, dict[str, Result]] = {}
    for column in NAMED:
        begun_s = time.monotonic()
        results[column] = run_on(
            column, names if column != DDL_FOR_MPI else need_mpi(results[GLOO]), options.np, options.limit_s
        )
        print(f"{column}: {len(results[column])} tests in {time.monotonic() - begun_s:.0f} s", flush=True)
        for result in results[column].values():
            if result.outcome in (FAILED, ENDED):
                print(f"  {result.test} {result.outcome} after {result.seconds:.1f} s: {result.text[-1500:]}")
    print(*markdown(results), sep="\n")
    if options.markdown:
        put(options.markdown, markdown(results), "torch_suite")
    return int(any(result.test not in REASONS for result in differing(results)))


if __name__ == "__main__":
    sys.exit(main())
