"""The end of a process is noticed at once and put into words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ddlcore.control.liveness import Watcher, describe_exit, open_pidfd

PATIENCE_S = 40.0


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-40, "killed by signal 40"),
    ],
)
def test_ends_in_words(returncode: int, text: str) -> None:
    """Codes by number, signals by number and name where they have one."""
    assert describe_exit(returncode) == text


@pytest.fixture(params=["pidfd", "threads"])
def watcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    """As on Linux, and as where there is no pidfd."""
    if request.param == "threads":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system has no pidfd")
    watcher = Watcher()
    yield watcher
    watcher.close()
    watcher.close()


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


def test_ends_are_noticed(watcher: Watcher) -> None:
    """Each with its rank and code, as they happen, also those from before the watching."""
    early = start("true")
    time.sleep(0.1)
    late = start("sleep", "60")
    watcher.add(0, early)
    watcher.add(1, late)
    assert watcher.wait(PATIENCE_S) == [(0, 0)]
    assert watcher.wait(0.05) == []
    began = time.monotonic()
    late.kill()
    assert watcher.wait(PATIENCE_S) == [(1, -signal.SIGKILL)]
    assert time.monotonic() - began < 20.0
    assert watcher.wait(0.0) == []


def test_a_grandchild_hides_no_end(watcher: Watcher) -> None:
    """A process that leaves a child with its descriptors behind has ended all the same."""
    script = "import os, time; print(os.fork() or time.sleep(60), flush=True); os._exit(5)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    try:
        watcher.add(7, parent)
        assert watcher.wait(PATIENCE_S) == [(7, 5)]
    finally:
        os.kill(grandchild, signal.SIGKILL)
        parent.stdout.close()


def test_wake_ends_a_wait(watcher: Watcher) -> None:
    """From another thread, before anything has ended."""
    began = time.monotonic()
    timer = threading.Timer(0.05, watcher.wake)
    timer.start()
    assert watcher.wait(PATIENCE_S) == []
    assert time.monotonic() - began < 20.0
    timer.join()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_no_process_no_pidfd() -> None:
    """A number that nobody has is an error, not a descriptor."""
    ended = start("true")
    ended.wait()
    with pytest.raises(ProcessLookupError):
        open_pidfd(ended.pid)
