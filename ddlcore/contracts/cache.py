"""Says where compiled kernels are kept, and keeps them: files that only their owner could have written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
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


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of ``directory``, which is made if need be and is ours alone to write: machine code is loaded from it.

    What is checked is what is used: all files are opened below this descriptor, whatever stands under the name by
    then. Raises OSError where the directory is a link, or where others may write.
    """
    for place in reversed([directory, *directory.parents]):
        if not place.exists():
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_foreign(os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _refuse_foreign(facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write there")


def _content(folder: int, name: str) -> bytes:
    """Raises OSError where it is not there, is no file, or others could have written it."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(file, "rb") as opened:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "no file")
        _refuse_foreign(facts)
        return opened.read()


def find(name: str, directories: Iterator[Path]) -> bytes | None:
    """What was kept under ``name``; None where it is nowhere, not whole, or could be another user's work."""
    for directory in directories:
        try:
            with _opened(directory) as folder:
                content = _content(folder, name)
        except OSError:
            continue
        body, digest = content[:-32], content[-32:]
        if hashlib.sha256(body).digest() == digest:
            return body
    return None


def keep(name: str, body: bytes, directories: Iterator[Path]) -> Path | None:
    """Writes ``body`` to the first place that takes it, whole or not at all; None: nowhere."""
    for directory in directories:
        try:
            with _opened(directory) as folder:
                _put(folder, name, body + hashlib.sha256(body).digest())
        except OSError:
            continue
        return directory
    return None


def _put(folder: int, name: str, content: bytes) -> None:
    new = f".{name}.{secrets.token_hex(8)}"
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


@contextlib.contextmanager
def alone(directories: Iterator[Path], timeout_s: float) -> Iterator[None]:
    """Holds what no other process holds at that time, so that one compiles and the others wait for its file.

    Past ``timeout_s``, or where there is no cache, it goes on without: to compile twice does no harm.
    """
    with contextlib.ExitStack() as stack:
        file = _lock_file(stack, directories)
        deadline = time.monotonic() + timeout_s
        while file >= 0 and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
            except OSError:  # a file system without locks
                break
        yield


def _lock_file(stack: contextlib.ExitStack, directories: Iterator[Path]) -> int:
    """Open until ``stack`` ends; -1 where there is no place for it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for directory in directories:
        try:
            with _opened(directory) as folder:
                file = os.open("compiling.lock", flags, 0o600, dir_fd=folder)
        except OSError:
            continue
        stack.callback(os.close, file)
        return file
    return -1
