"""Reads and writes compiled kernels in a cache directory. A file that another user could have written is never used."""

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

from ddlcore.config.table import SETTINGS

__all__ = ["alone", "cache_directories", "find", "keep"]

POLL_S = 0.05
_ROW = next(row for row in SETTINGS if row.name == "cache_dir")


def cache_directories(chosen: str = "", environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the possible directories for compiled kernels, the preferred one first.

    If ``chosen`` is not empty, yield only ``chosen``. If ``chosen`` is empty and ``environ`` contains
    ``DDL_CACHE_DIR``, yield only the directory in that variable. Otherwise, yield the usual cache directories of the
    user, and then one in the directory for temporary files.
    """
    chosen = chosen or environ.get(_ROW.env, "")
    if chosen:
        yield Path(chosen)
        return
    if environ.get("XDG_CACHE_HOME"):
        yield Path(environ["XDG_CACHE_HOME"]) / "ddl"
    home = Path("~").expanduser()
    if home.is_absolute():  # relative if the user has no home directory
        yield home / ".cache" / "ddl"
    yield Path(tempfile.gettempdir()) / f"ddl-{os.getuid()}"


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Check that only this user and root can write to ``directory``, and yield a file descriptor of the directory.

    The check is necessary because machine code is loaded from this directory. All files are opened relative to the
    descriptor. So they are in the directory that was checked, even if another directory has got the same name since
    the check. Raises OSError if the directory does not exist, if it is a link, or if other users may write to it.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_foreign(os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _make(directory: Path) -> None:
    """Create ``directory`` and its parents, if they do not exist, so that only this user can use them."""
    for place in reversed([directory, *directory.parents]):
        if not place.exists():
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)


def _refuse_foreign(facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write there")


def _content(folder: int, name: str) -> bytes:
    """Return the content of the file ``name`` in the directory with the descriptor ``folder``.

    Raises OSError if the file is missing, is not a regular file, or could be written by other users.
    """
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(file, "rb") as opened:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "no file")
        _refuse_foreign(facts)
        return opened.read()


def find(name: str, directories: Iterator[Path]) -> bytes | None:
    """Return the bytes that ``keep`` has stored under ``name`` in one of ``directories``.

    Return None if the bytes are missing or damaged, or if another user could have written them.
    """
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
    """Write ``body`` atomically to the file ``name`` in the first of ``directories`` that can be written.

    Return that directory, or None if no directory can be written.
    """
    for directory in directories:
        try:
            _make(directory)
            with _opened(directory) as folder:
                _put(folder, name, body + hashlib.sha256(body).digest())
        except OSError:
            continue
        return directory
    return None


def _put(folder: int, name: str, content: bytes) -> None:
    # Other processes read this directory without taking the lock, and this process may crash at any moment. So the
    # content is first written to a file with a random name, and the rename makes it visible in one step. After a power
    # failure, the name may exist without its data: ``find`` detects that by the digest at the end of the file.
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
    """Run the ``with`` block under a lock, so that one process compiles a kernel while the others wait for its file.

    The block runs without the lock if the lock is not free after ``timeout_s`` seconds, or if no lock file can be
    created in any of ``directories``. This is safe: it does no harm if two processes compile the same kernel.
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
    """Return a file descriptor of the lock file, or -1 if the file cannot be created in any of ``directories``.

    ``stack`` closes the descriptor when ``stack`` ends.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for directory in directories:
        try:
            _make(directory)
            with _opened(directory) as folder:
                file = os.open("compiling.lock", flags, 0o600, dir_fd=folder)
        except OSError:
            continue
        stack.callback(os.close, file)
        return file
    return -1
