"""Runs a suite in a child process, and collects the results. A test that hangs or crashes counts as failed.

After such a test, a new child process runs the remaining tests. After too many such tests, the remaining tests are
recorded as not run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddl_conform.conform.kinds import ProviderUnderTest
from ddl_conform.levels import LevelResult

RESTARTS = 8  # at most so many child processes are started after the first one; then the remaining tests do not run
POLL_S = 0.05
_OUTPUT = 2000  # how many characters of a crashed process's output are kept


@dataclass
class ConformRun:
    """The results of the tests of one plugin (``subject``)."""

    subject: ProviderUnderTest
    results: list[LevelResult] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)  # "Class.method  (file:line)"
    seconds: float = 0.0
    refused: str = ""  # why nothing ran; then there are no results


def conform(
    subject: ProviderUnderTest,
    *,
    test_s: float,
    only: Sequence[str] = (),
    told: Callable[[int, int, str], None] = lambda done, all_, name: None,
) -> ConformRun:
    """Run the suite of ``subject`` to its end, and return the results.

    ``test_s`` is the time limit of one test in seconds. ``only`` contains the names of the tests to run, with or
    without their parameters; empty means all tests. At the beginning of each test, ``told(done, all, name)`` is called
    with the number of tests that have a result, the number of all tests, and the name of the test.
    """
    run = ConformRun(subject)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddl-conform-") as folder:
        gathering = _Gathering(run, told)
        for restart in range(RESTARTS + 1):
            ended = _session(Path(folder), subject, gathering, test_s, only)
            if ended or run.refused:
                break
            if restart == RESTARTS:
                gathering.give_up(f"{RESTARTS + 1} tests before it hung or ended their process")
    run.seconds = time.monotonic() - begun_s
    return run


class _Gathering:
    """The collector of a run's results, which reads the lines of JSON that the child process writes."""

    def __init__(self, run: ConformRun, told: Callable[[int, int, str], None]) -> None:
        self.run, self._told = run, told
        self.names: list[str] = []
        self.current = ""

    def hear(self, line: str) -> None:
        word: dict[str, Any] = json.loads(line)
        if "refused" in word:
            self.run.refused = word["refused"]
        elif "unwritten" in word:
            self.run.unwritten = word["unwritten"]
        elif "collected" in word:
            self.names = word["collected"]
        elif "begin" in word:
            self.current = word["begin"]
            self._told(len(self.done()), len(self.names), self.current)
        elif "end" in word:
            self._end(word["end"])

    def _end(self, word: dict[str, Any]) -> None:
        phase = word.pop("phase", "call")
        if phase != "call":
            word["reason"] = f"in {phase}: {word['reason']}"
        if word["name"] not in self.done():
            self.run.results.append(LevelResult(**word))
        elif word["outcome"] == "failed":  # the test passed, and its teardown failed
            self.run.results = [LevelResult(**word) if r.name == word["name"] else r for r in self.run.results]

    def done(self) -> set[str]:
        return {result.name for result in self.run.results}

    def lost(self, code: int, output: str) -> None:
        """Record that the test ``current`` failed, because the child process ended during this test.

        ``code`` is the exit code of the process, or minus the number of the signal that ended it. ``output`` is the
        text that the process has written.
        """
        late = "Timeout (" in output
        ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        what = "was not over in time; its process was ended" if late else f"ended the process {ended}"
        self.run.results.append(LevelResult(self.current, "failed", f"it {what}", detail=output[-_OUTPUT:]))

    def give_up(self, reason: str) -> None:
        """Record for every test without a result that it was not run, with the text ``reason``."""
        done = self.done()
        self.run.results += [LevelResult(name, "not run", reason) for name in self.names if name not in done]


def _session(
    folder: Path, subject: ProviderUnderTest, gathering: _Gathering, test_s: float, only: Sequence[str]
) -> bool:
    """Run one child process, which runs the tests that have no result yet.

    Return True if no further child process is needed. Return False if the process ended during a test; this test is
    then recorded as failed.
    """
    words, output = folder / "words", folder / "output"
    words.write_text("")
    order = {
        "name": subject.provider.name,
        "kind": subject.kind,
        "only": list(only),
        "done": sorted(gathering.done()),
        "test_s": test_s,
        "words": str(words),
    }
    (folder / "order.json").write_text(json.dumps(order))
    gathering.current = ""
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddl_conform.conform.child", str(folder / "order.json")],
            env=_environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _listen(process, words, gathering)
        finally:
            with suppress(ProcessLookupError):  # also ends what the tests have started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return True
    text = output.read_text(errors="replace")
    if not gathering.current or gathering.current in gathering.done():
        gathering.run.refused = f"pytest ended with code {process.returncode}: {text.strip()[-_OUTPUT:]}"
        return True
    gathering.lost(process.returncode, text)
    return False


def _listen(process: subprocess.Popen[bytes], words: Path, gathering: _Gathering) -> None:
    """Read the lines that the child process writes to the file ``words``, and pass each line to ``gathering``.

    Return when the process has ended and all its lines are handled.
    """
    rest = ""
    with open(words) as file:
        while True:
            over = process.poll() is not None
            text = rest + file.read()
            *lines, rest = text.split("\n")
            for line in lines:
                gathering.hear(line)
            if over:
                return
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)


def _environment() -> dict[str, str]:
    """Return the environment of the child process: the environment of this process, with three changes.

    The child finds modules in the same places as this process. pytest loads none of the installed pytest plugins. The
    variable PYTEST_ADDOPTS is removed, so that the environment adds no options to pytest.
    """
    environ = dict(os.environ)
    environ.pop("PYTEST_ADDOPTS", None)
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return environ
