"""Starts ``ddl`` as a user does, in a process of its own, with a deadline."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddlcore.launch.ranks.warmup import compile_kernels
from tests.launch.starting import DDL, Begin, Ddl, environment


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled() -> None:
    """Else the first test to start Python ranks would wait for them, and some measure time."""
    compile_kernels(print, "")


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
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Whatever a test leaves running is killed, and the test says so by the leak check."""
    begun: list[subprocess.Popen[str]] = []

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
def until() -> Callable[[Callable[[], bool]], None]:
    """``until(condition)``: waits for it, at most 20 s."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 80.0
        while not condition():
            assert time.monotonic() < deadline_s, "waited 20 s in vain"
            time.sleep(0.01)

    return wait
