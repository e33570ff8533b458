"""Says where compiled kernels are kept, and keeps them: files that only their owner could have written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddlcore.config import SETTINGS

__all__ = ["alone", "cache_directories", "find", "keep"]

POLL_S = 0.05
_ROW = next(row for row in SETTINGS if row.name == "cache_dir")


def cache_directories(chosen: str = "", environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """The places for compiled kernels, best first; ``chosen`` (else ``DDL_CACHE_DIR``) is the only one if given."""
    chosen = chosen or environ.get(_ROW.env, "")
    if chosen:
        yield Path(chosen)
        return
    if environ.get("XDG_CACHE_HOME"):
        yield Path(environ["XDG_CACHE_HOME"]) / "ddl"
    home = Path("~").expanduser()
    if home.is_absolute():  # not where the user has no home at all
        yield home / ".cache" / "ddl"
    yield Path(tempfile.gettempdir()) / f"ddl-{os.getuid()}"


def _usable(directory: Path) -> bool:
    """Whether ``directory`` is ours alone to write: machine code is loaded from it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = os.lstat(directory) if directory.is_symlink() else os.stat(directory)
    except OSError:
        return False
    foreign = facts.st_uid not in (os.getuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(facts.st_mode) and not foreign


def find(name: str, directories: Iterator[Path]) -> bytes | None:
    """What was kept under ``name``; None where it is nowhere, or not whole."""
    for directory in directories:
        try:
            if not _usable(directory):
                continue
            content = (directory / name).read_bytes()
        except OSError:
            continue
        body, digest = content[:-32], content[-32:]
        if hashlib.sha256(body).digest() == digest:
            return body
    return None


def keep(name: str, body: bytes, directories: Iterator[Path]) -> Path | None:
    """Writes ``body`` to the first place that takes it, whole or not at all; None: nowhere."""
    for directory in directories:
        if not _usable(directory):
            continue
        try:
            handle, temporary = tempfile.mkstemp(dir=directory, prefix=name)
            with os.fdopen(handle, "wb") as file:
                file.write(body + hashlib.sha256(body).digest())
            os.replace(temporary, directory / name)
        except OSError:
            continue
        return directory
    return None


@contextlib.contextmanager
def alone(directories: Iterator[Path], timeout_s: float) -> Iterator[None]:
    """Holds what no other process holds at that time, so that one compiles and the others wait for its file.

    Past ``timeout_s``, or where there is no cache, it goes on without: to compile twice does no harm.
    """
    directory = next((each for each in directories if _usable(each)), None)
    if directory is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(directory / "compiling.lock", "ab"))
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(POLL_S)
        yield
