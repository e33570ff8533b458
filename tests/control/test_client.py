"""A rank's process: what it does when launchers die, when it forks, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddlcore.control.client import connect, connect_with
from ddlcore.control.credentials import read_job_file
from ddlcore.errors import DdlInternalError
from tests.control.echo import PATIENCE_S, WIRES, Net, greet, hello

ROOT = Path(__file__).parents[2]

LAUNCHER = """
    import os, sys, time
    from ddlcore.control.server import Server
    from tests.control.echo import EchoCoordinator
    server = Server(2, EchoCoordinator(), sys.argv[1])
    server.start()
    print(server.job_file, flush=True)
    sys.stdin.readline()
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""

RANK = """
    import gc, os, sys
    from ddlcore.control.client import connect
    from ddlcore.errors import DdlInternalError
    from tests.control.echo import greet, request
    channel, store = connect(sys.argv[1], 0)
    assert greet(channel, 0)
    store.set("parent", b"here")

    def in_child(way):
        for call in (lambda: channel.send(request(1)), lambda: channel.receive(0.0), lambda: store.add("n", 1)):
            try:
                call()
            except DdlInternalError as error:
                assert "forked from rank 0" in str(error), error
            else:
                os._exit(9)
        channel.wake()
        if way != "leave":
            channel.close()
            store.close()
        if way == "now":
            os._exit(0)
        globals().pop("channel"), globals().pop("store")
        gc.collect()
        sys.exit(0)  # runs atexit and the ends of all objects

    for way in ("now", "close", "leave"):
        child = os.fork()
        if child == 0:
            in_child(way)
        assert os.waitpid(child, 0)[1] == 0, way
        assert channel.receive(0.0) == []  # no wake-up came from the child
        channel.send(request(5))
        assert channel.receive(10.0)
        assert store.get("parent", 0.0) == b"here"
    channel.close()
    store.close()
    print("fine")
"""


def run(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(params=["ipc", "tcp"])
def launcher(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher in a process of its own, and its job file."""
    process = run(LAUNCHER, WIRES[request.param] or "")
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate(timeout=PATIENCE_S)


@pytest.mark.processes
def test_a_killed_launcher_is_noticed(launcher: tuple[subprocess.Popen[str], str]) -> None:
    """kill -9: a receive and a call of the store raise soon, and the job file is gone."""
    process, job_file = launcher
    channel, store = connect(job_file, 0)
    try:
        assert greet(channel, 0)
        store.set("a", b"")
        process.kill()
        start = time.monotonic()
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            channel.receive(30.0)
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            store.get("never", 30.0)
        assert time.monotonic() - start < 20.0
        process.wait(PATIENCE_S)
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            connect(job_file, 0)
    finally:
        start = time.monotonic()
        channel.close()
        store.close()
    assert time.monotonic() - start < 20.0


@pytest.mark.processes
def test_what_has_ended_is_named(launcher: tuple[subprocess.Popen[str], str]) -> None:
    """Not every coordinator is in a launcher; on one host it is known that its process has ended."""
    process, job_file = launcher
    channel, store = connect_with(read_job_file(job_file), 0, "the coordinator in the process of rank 0")
    try:
        assert greet(channel, 0)
        store.set("a", b"")
        process.kill()
        why = r"its process has ended|the connection to it at tcp://127\.0\.0\.1:\d+ has ended"
        for call in (lambda: channel.receive(30.0), lambda: store.get("never", 30.0)):
            with pytest.raises(DdlInternalError, match=rf"^the coordinator in the process of rank 0 is gone: ({why})$"):
                call()
    finally:
        channel.close()
        store.close()


@pytest.mark.processes
def test_a_killed_launcher_is_noticed_behind_its_child() -> None:
    """On one host also where a child that it forked still holds the launcher's ends of all connections."""
    process = run(LAUNCHER, "")
    assert process.stdin is not None
    assert process.stdout is not None
    channel, store = connect(process.stdout.readline().strip(), 0)
    assert greet(channel, 0)
    store.set("a", b"")
    process.stdin.write("fork\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    try:
        process.kill()
        start = time.monotonic()
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            channel.receive(60.0)
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            store.get("never", 60.0)
        assert time.monotonic() - start < 20.0
    finally:
        os.kill(child, 9)
        channel.close()
        store.close()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.processes
def test_forked_children_touch_nothing(served: Net) -> None:
    """However a forked child leaves, its parent's channel and store go on; in the child they raise, or do nothing."""
    process = run(RANK, served.server.job_file)
    output, _ = process.communicate(timeout=PATIENCE_S * 2)
    assert (process.returncode, output) == (0, "fine\n")
    assert served.server.dropped == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list descriptors")
def test_nothing_is_left_open(served: Net) -> None:
    """50 times connect, talk and close leave as many descriptors and threads as before."""

    def once() -> None:
        channel, store = connect(served.server.job_file, 0)
        assert greet(channel, 0)
        store.set("a", b"")
        channel.close()
        store.close()

    once()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(50):
        once()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if after <= before or time.monotonic() > deadline:
            break
        time.sleep(0.02)  # the server closes its ends a little later
    assert after <= before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list descriptors")
def test_no_descriptor_is_inherited(served: Net) -> None:
    """All that server and rank open is closed in the programs they start."""
    before = set(os.listdir("/proc/self/fd"))
    other = Net(served.wire)
    _, store = other.join(0)
    store.set("a", b"")
    opened = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before]
    inherited = [fd for fd in opened if is_open(fd) and not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC]
    other.close()
    assert len(opened) > 10
    assert inherited == []


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_the_store_outlives_the_channel(served: Net) -> None:
    """Either may be closed first; a store that was never used opens nothing."""
    channel, store = served.join(0)
    channel.close()
    store.set("a", b"1")
    assert store.get("a", 0.0) == b"1"
    store.close()
    channel, store = served.join(0)
    store.close()
    channel.close()


def test_closing_does_not_wait_for_a_launcher_that_never_answered(served: Net) -> None:
    """200 ms for the last words of a line, then it ends all the same."""
    channel, store = connect(served.server.job_file, 0)
    channel.send(hello(0))
    served.server.close()
    start = time.monotonic()
    channel.close()
    store.close()
    assert time.monotonic() - start < 20.0
