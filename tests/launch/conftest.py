"""Starts ``ddl`` as a user does, in a process of its own, with a deadline."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddlcore.launch.ranks.warmup import compile_kernels
from tests.kernels.compiled import ALL_CODE
from tests.launch.starting import DDL, Begin, Ddl, environment

AFTER_THE_END_S = 20.0  # a condition may come true after the end of `ddl`, by what it has started


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled() -> None:
    """Else the first test to start Python ranks would wait for them, and some measure time."""
    compile_kernels(ALL_CODE, print, "")


@pytest.fixture
def ddl(tmp_path: Path) -> Ddl:
    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*DDL, *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=200,
            cwd=tmp_path,
            env=environment(env),
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def begun() -> list[subprocess.Popen[str]]:
    """What the test has started by ``begin``."""
    return []


@pytest.fixture
def begin(tmp_path: Path, begun: list[subprocess.Popen[str]]) -> Iterator[Begin]:
    """Whatever a test leaves running is killed, and the test says so by the leak check."""

    def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*DDL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(env),
            stdin=subprocess.DEVNULL,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=40)


@pytest.fixture
def until(begun: list[subprocess.Popen[str]]) -> Callable[[Callable[[], bool]], None]:
    """``until(condition)``: wait for it. If everything that the test has started has ended, the time is short.

    A failure shows what those processes have written.
    """

    def wait(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 80.0
        have_ended = False
        while not condition():
            if begun and not have_ended and all(process.poll() is not None for process in begun):
                have_ended = True
                deadline_s = min(deadline_s, time.monotonic() + AFTER_THE_END_S)
            assert time.monotonic() < deadline_s, f"waited in vain\n{told(begun)}"
            time.sleep(0.01)

    return wait


def told(begun: list[subprocess.Popen[str]]) -> str:
    """Return the exit code and the output of each process that has ended."""
    lines = []
    for process in begun:
        if process.poll() is None:
            lines.append(f"{process.args!r} runs")
            continue
        out, err = process.communicate(timeout=40)
        lines.append(f"{process.args!r} ended with {process.returncode} and wrote:\n{out}\n{err}")
    return "\n".join(lines)
