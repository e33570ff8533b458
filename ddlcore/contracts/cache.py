"""Decides where compiled kernels are stored, reads and writes them, and trusts no file that another user can write."""

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
    """Yield the directories for compiled kernels, in the order of preference.

    If ``chosen`` is given, it is the only one; otherwise, if ``DDL_CACHE_DIR`` is set, that is the only one.
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
    """Yield a descriptor of ``directory``, to which only this user (or root) can write. Create it if it does not exist.

    Machine code is loaded from this directory. All files are opened relative to the descriptor, so they are in the
    directory that was checked, even if another directory has got its name meanwhile. Raises OSError if the directory is
    a link, or if other users may write to it.
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
    """Return the bytes that ``keep`` has stored under ``name``.

    Returns None if they are missing or damaged, or if another user could have written them.
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
    """Write ``body`` under ``name`` to the first directory where this is possible, atomically.

    Returns that directory, or None if there is none.
    """
    for directory in directories:
        try:
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
    """Hold a lock between processes, so that one process compiles while the others wait for its file.

    After ``timeout_s`` seconds, or if no directory can hold the lock, the block runs without the lock: if two processes
    compile the same kernel, this does no harm.
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
    """Return a descriptor of the lock file; -1 if no directory can hold the file. ``stack`` closes it at its end."""
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
