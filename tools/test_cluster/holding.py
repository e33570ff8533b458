"""Keeps a test cluster's processes and directory, and removes directories of test clusters whose owners died."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.test_cluster.possible import INSIDE

__all__ = ["ENDING_S", "STARTING_S", "command", "end", "hold", "locked_directory", "pid_when_ready", "remove_stale"]

PREFIX = "ddl-cluster-"
STARTING_S = 20.0
ENDING_S = 10.0


def command(root: Sequence[str], directory: Path, verb: str, spec: Mapping[str, Any]) -> list[str]:
    """Return the command that runs a verb of inside.py.

    Its arguments go through a file that only we and root can read.
    """
    path = directory / f"{uuid.uuid4().hex}.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(spec, file)
    return [*root, *INSIDE, verb, str(path)]


def hold(argv: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that holds the namespaces of a host or of the switch."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,  # its end tells the holder to end, even if this process is killed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C must reach only this process
    )


def pid_when_ready(name: str, holder: subprocess.Popen[str], deadline_s: float) -> int:
    """Read the holder's pid and its ready message, which come in either order, and return the pid."""
    assert holder.stdout is not None
    said = ""
    while "ready\n" not in said or "pid " not in said:
        left_s = max(0.0, deadline_s - time.monotonic())
        heard = b""
        if select.select([holder.stdout], [], [], left_s)[0]:
            heard = os.read(holder.stdout.fileno(), 4096)
        if not heard:
            why = "; ".join(line for line in said.splitlines() if not line.startswith("pid "))
            raise RuntimeError(f"{name} did not come up: {why or f'no word within {STARTING_S:g} s'}")
        said += heard.decode(errors="replace")
    return int(next(line.split()[1] for line in said.splitlines() if line.startswith("pid ")))


def end(holders: Sequence[subprocess.Popen[str]]) -> None:
    """Tell the holders to end, and wait until they have."""
    for holder in holders:
        assert holder.stdin is not None
        holder.stdin.close()
    deadline_s = time.monotonic() + ENDING_S
    for holder in holders:
        try:
            holder.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def locked_directory() -> tuple[Path, int]:
    """Return a new directory, and the descriptor of its lock, which is held while its owner lives."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():  # otherwise another test cluster removed it before we had the lock
            return path, descriptor
        os.close(descriptor)


def remove_stale() -> None:
    """Remove the directories of test clusters whose owner was killed, together with the switch.

    A switch that lives would have removed its directory.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
