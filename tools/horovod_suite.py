"""Runs Horovod's own tests on ddl, under horovodrun, and prints how many pass, and what fails.

    python tools/horovod_suite.py CHECKOUT [--np 2] [--only 'test_torch*'] [--tests PATTERN] [--limit-s 60] [--markdown FILE]

CHECKOUT is a checkout of Horovod, best at the tag v0.28.1. Its folder test/ is used, and nothing else of it; the names that the
tests import come from ddl-horovod, and some helpers of Horovod's launcher from this program. Each file runs in ranks that
horovodrun starts. When a test fails on a rank, or takes too long, the ranks may be apart, so the tests behind it run in new
ranks. A test counts as failed if it fails on any rank. Keras is the one of Horovod's time, tf_keras. Some files need
`pip install parameterized`. The exit code is 1 if a test without a reason in REASONS fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from tools import horovod_launches
from tools.bench_verdicts import put

__all__ = ["REASONS", "TestOutcome", "main", "markdown", "run_file", "worst"]

_LOADER = unittest.defaultTestLoader
PASSED, SKIPPED, FAILED, ENDED = OUTCOMES = ("passed", "skipped", "failed", "ended")

_IN_GRAPHS = (
    *(f"{verb}{kind}" for verb in ("allgather", "allreduce", "broadcast", "reducescatter") for kind in ("", "_type")),
    "alltoall_rank",
    "alltoall_type",
    "broadcast_rank",
)
# Tests that cannot pass, by the end of their name, each with its reason.
_CLASS = "In a graph, TensorFlow gives each error of Python code the class UnknownError; the text says what differs."
_AGE = "It needs an older "
REASONS: dict[str, str] = {
    **{f"TensorFlowTests.test_horovod_{name}_error": _CLASS for name in _IN_GRAPHS},
    "indexed_slices_average_cpu": "An average of integers keeps their type; the test expects floating-point numbers.",
    "test_horovod_join_allgather": "An allgather works although a rank has joined; the test wants an error.",
    "test_horovod_join_broadcast": "A broadcast works although a rank has joined; the test wants an error.",
    "test_timeline_api": "ddl does not work in cycles, so its timelines have no marks of cycles.",
    "test_broadcast_state_no_grad": f"{_AGE}PyTorch, whose zero_grad() makes zeros, not None.",
    "TensorFlowProcessSetsTests.test_horovod_allreduce_process_set_id_error": _CLASS,
    "TimelineTests.test_timeline": "It reads the file while the timeline is recorded; ddl writes the file at the end.",
}


@dataclass(frozen=True)
class TestOutcome:
    """What became of one test on one rank: one of OUTCOMES; ENDED if the process ended in it."""

    __test__ = False  # it is no test

    test: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


class _Told(unittest.TestResult):
    """Appends the result of each test to a file as soon as it is known. A failure ends this process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._begun_s = path, 0.0

    def tell(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        result = TestOutcome(_id(test), outcome, text, round(time.monotonic() - self._begun_s, 2))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun_s = time.monotonic()
        self.tell(test, ENDED)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.tell(test, PASSED)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        if err[0].__name__ == "Skipped":  # by pytest
            self.tell(test, SKIPPED, str(err[1]))
            return
        self.tell(test, FAILED, self._exc_info_to_string(err, test))  # type: ignore[attr-defined]
        os._exit(1)

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.tell(test, SKIPPED, reason)


def _id(test: unittest.TestCase) -> str:
    return ".".join(test.id().partition(" ")[0].split(".")[-2:])  # a part of a test counts as the test


def _tests_of(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        yield from [one] if isinstance(one, unittest.TestCase) else _tests_of(one)


def _load(file: Path) -> list[unittest.TestCase]:
    """Import ``file``, and return its tests in their order."""
    test = file.parents[1]
    sys.path[:0] = [str(file.parent), str(test / "utils"), str(test)]
    _lend_helpers(file)
    if horovod_launches.starts_jobs(file):
        horovod_launches.lend_launcher()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    if horovod_launches.starts_jobs(file):
        horovod_launches.travel(module)
    spec.loader.exec_module(module)
    _skip_marked(module)
    functions = [unittest.FunctionTestCase(one) for name, one in vars(module).items() if _is_test(name, one)]
    return [*_tests_of(_LOADER.loadTestsFromModule(module)), *functions]


def _is_test(name: str, one: object) -> bool:
    return name.startswith("test") and isinstance(one, types.FunctionType)


def _skip_marked(module: Any) -> None:
    """Make tests of ``module`` that pytest would skip be skipped, with all tests of a class that is marked.

    The class of such tests is not made, because its constructor may need what is not there.
    """
    for name, cls in list(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, unittest.TestCase)):
            continue
        why = {test: _why_skipped(cls) or _why_skipped(getattr(cls, test)) for test in _LOADER.getTestCaseNames(cls)}
        if why and all(why.values()):
            skipping = {test: _skipping(reason) for test, reason in why.items()}
            setattr(module, name, type(name, (unittest.TestCase,), skipping))
        else:
            for test, reason in why.items():
                if reason:
                    setattr(cls, test, _skipping(reason))


def _why_skipped(marked: Any) -> str:
    marks = [one for one in getattr(marked, "pytestmark", ()) if one.name == "skipif" and one.args[0]]
    return str(marks[0].kwargs.get("reason")) if marks else ""


def _skipping(reason: str) -> Callable[[unittest.TestCase], None]:
    return lambda test: test.skipTest(reason)


def _lend_helpers(file: Path) -> None:
    """Make what the tests in ``file`` use for their own purposes: modules of Horovod's launcher, and the package mock."""
    import unittest.mock

    def in_thread(target: Callable[..., Any], args: Sequence[Any] = (), **_kwargs: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=tuple(args), daemon=True)
        thread.start()
        return thread

    for name, members in {"util": {}, "util.threads": {"in_thread": in_thread}}.items():
        module = types.ModuleType(f"horovod.runner.{name}")
        vars(module).update(members)
        sys.modules.setdefault(module.__name__, module)
    vars(unittest.mock).setdefault("version_info", (5,))
    sys.modules.setdefault("mock", unittest.mock)
    vars(importlib.import_module("horovod.common.util"))["_cache"] = functools.cache
    if importlib.util.find_spec("tensorflow") and "tensorflow" in file.read_text(encoding="utf-8"):
        import tensorflow as tf

        for name in ("horovod.tensorflow", "horovod.tensorflow.util"):
            vars(importlib.import_module(name))["_executing_eagerly"] = tf.executing_eagerly
    if importlib.util.find_spec("torch"):
        import torch

        if muon := getattr(torch.optim, "Muon", None):
            muon.__module__ = "newer"  # the tests try all optimizers of torch.optim, and this one takes matrices only


def _run_here(file: Path, place: Path, limit_s: float) -> None:
    """Run the tests of ``file`` that the file "names" in ``place`` lists, one after the other, in this rank."""
    told = _Told(place / f"rank.{os.environ.get('HOROVOD_RANK', 0)}")
    tests = {_id(test): test for test in _load(file)}
    for name in (place / "names").read_text(encoding="utf-8").split():
        signal.signal(signal.SIGALRM, lambda *_: _late(limit_s))
        signal.alarm(int(limit_s))
        unittest.TestSuite([tests[name]]).run(told)
        signal.alarm(0)


def _late(limit_s: float) -> None:
    raise TimeoutError(f"the test has taken {limit_s:.0f} s")


def worst(ranks: Sequence[TestOutcome]) -> TestOutcome:
    """Return the result of a test from those of its ranks: the worst one, and of equal ones the first that was not an echo."""
    height = max(OUTCOMES.index(one.outcome) for one in ranks)
    found = [one for one in ranks if OUTCOMES.index(one.outcome) == height]
    return min(found, key=lambda one: "PeerLost" in one.text)


def run_file(file: Path, names: Sequence[str], size: int, limit_s: float) -> dict[str, TestOutcome]:
    """Return the results of the tests ``names`` of ``file`` on ``size`` ranks, by name. 0: in one process of no job."""
    results: dict[str, TestOutcome] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as place:
            here = [sys.executable, __file__, str(file), "--here", place, "--limit-s", str(limit_s)]
            (Path(place) / "names").write_text("\n".join(left), encoding="utf-8")
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(size)] if size else []
            ended = _run([*launcher, *here], 60 + limit_s * len(left))
            told: dict[str, dict[int, TestOutcome]] = {}
            for rank in range(max(size, 1)):
                path = Path(place) / f"rank.{rank}"
                for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                    one = TestOutcome(**json.loads(line))
                    told.setdefault(one.test, {})[rank] = one
        if not told:
            return results | {name: TestOutcome(name, ENDED, ended[-3000:]) for name in left}
        for name, ranks in told.items():
            results[name] = worst(list(ranks.values()))
        reached = max(left.index(name) for name in told)
        left = left[reached + 1 :]
    return results


def _run(command: Sequence[str], limit_s: float) -> str:
    """Run ``command``, and return what it has printed. After ``limit_s`` seconds, end it and what it has started."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_USE_LEGACY_KERAS": "1"}
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        return file.read()


def markdown(results: dict[str, dict[str, TestOutcome]]) -> list[str]:
    """Return the numbers of tests by file and outcome, and below them the tests that fail, by their reasons."""
    lines = ["| file | passed | failed | skipped |", "|---|--:|--:|--:|"]
    for file, rows in results.items():
        count = Counter(one.outcome for one in rows.values())
        lines.append(f"| `{file}` | {count[PASSED]} | {count[FAILED] + count[ENDED]} | {count[SKIPPED]} |")
    failed = [one for rows in results.values() for one in rows.values() if one.outcome in (FAILED, ENDED)]
    because: dict[str, list[str]] = {}
    for one in failed:
        because.setdefault(_reason(one) or one.outcome, []).append(f"`{one.test}`")
    if failed:
        lines += ["", "| why tests do not pass | which |", "|---|---|"]
        lines += [f"| {why} | {', '.join(tests)} |" for why, tests in because.items()]
    return lines


def _reason(one: TestOutcome) -> str:
    reasons = {**REASONS, **horovod_launches.REASONS}
    return next((why for name, why in reasons.items() if one.test.endswith(name)), "")


def main(files: str = "parallel/test_*") -> int:
    """Run the tests and print the table. Return the exit code. ``files`` is the default of the option --only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod")
    parser.add_argument("--np", type=int, default=2, help="ranks of each test (default: 2)")
    parser.add_argument(
        "--only", default=files, metavar="PATTERNS", help=f"files below test/, separated by commas (default: {files})"
    )
    parser.add_argument(
        "--tests", default="*", metavar="PATTERN", help="tests whose names match, such as '*allreduce*'"
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds that a test may take (default: 60)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table into this file, between its marks")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print(*(f"test: {_id(one)}" for one in _load(options.checkout)), sep="\n")
        return 0
    if options.here:
        _run_here(options.checkout, options.here, options.limit_s)
        return 0
    results: dict[str, dict[str, TestOutcome]] = {}
    for file in sorted(one for only in options.only.split(",") for one in (options.checkout / "test").glob(only)):
        begun_s = time.monotonic()
        if file.name in horovod_launches.NOT_RUN:
            results[file.name] = {file.name: TestOutcome(f"all of {file.name}", ENDED)}
            continue
        listed = _run([sys.executable, __file__, str(file), "--list"], 120.0)
        names = [line.removeprefix("test: ") for line in listed.splitlines() if line.startswith("test: ")]
        if not names:
            results[file.name] = {file.name: TestOutcome(f"all of {file.name}", ENDED, listed[-3000:])}
        else:
            chosen = fnmatch.filter(names, options.tests)
            starts = horovod_launches.starts_jobs(file)  # in one process, which needs more time than a rank
            limit_s = max(options.limit_s, horovod_launches.LIMIT_S) if starts else options.limit_s
            results[file.name] = run_file(file, chosen, 0 if starts else options.np, limit_s)
        print(f"{file.name}: {len(results[file.name])} tests in {time.monotonic() - begun_s:.0f} s", flush=True)
        for one in results[file.name].values():
            if one.outcome in (FAILED, ENDED):
                print(f"  {one.test} {one.outcome} after {one.seconds:.1f} s: {one.text[-1500:]}", flush=True)
    print(*markdown(results), sep="\n")
    if options.markdown:
        put(options.markdown, markdown(results), "horovod_suite")
    failed = [one for rows in results.values() for one in rows.values() if one.outcome in (FAILED, ENDED)]
    return int(any(not _reason(one) for one in failed))


if __name__ == "__main__":
    sys.exit(main())
