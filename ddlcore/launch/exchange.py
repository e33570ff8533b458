"""What a launching process and its ranks hand each other, in files without a name that only they hold."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

__all__ = ["FUNCTION_PROGRAM", "Outcome", "Task", "nameless_file", "read_all", "write_all"]

# What a rank of a function executes, by `own_python`, with TASK_FD, RESULT_FD and the number of its parent.
FUNCTION_PROGRAM = "from ddlcore.launch.child import main; sys.exit(main(sys.argv[1:]))"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Task:
    """``call`` is (fn, args, kwargs) by cloudpickle, to be read after ``path`` has become sys.path."""

    path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True)
class Outcome:
    """What a rank came to: a value, or what was raised."""

    value: bytes = b""  # by cloudpickle
    error: bytes = b""  # the exception by cloudpickle, where it can be pickled
    text: str = ""  # "ValueError: what it said"; "" where nothing was raised
    trace: str = ""  # as Python prints it
    secondary: bool = False  # it only says that another rank was lost


def nameless_file() -> int:
    """A descriptor of an empty file: in memory where the system can, else in the temporary directory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddl-exchange")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_all(fd: int, data: bytes) -> None:
    """Writes all of ``data``; one call of the system takes at most 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:_CHUNK_BYTES]) :]


def read_all(fd: int) -> bytes:
    """All of the file from its beginning. Its readers share one offset, so none is used."""
    parts, at = [], 0
    while data := os.pread(fd, _CHUNK_BYTES, at):
        parts.append(data)
        at += len(data)
    return b"".join(parts)
