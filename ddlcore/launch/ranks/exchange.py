"""Pass the function and its results between a launching process and its ranks, in files without a name.

Only these processes have descriptors of the files, so no other process can open the files.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

# The program of a rank of `ddlcore.run`, for `own_python`. The arguments are TASK_FD, RESULT_FD and the parent's pid.
FUNCTION_PROGRAM = "from ddlcore.launch.ranks.child import main; sys.exit(main(sys.argv[1:]))"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Task:
    """The function call that each rank must make. ``call`` is (fn, args, kwargs), pickled by cloudpickle.

    The rank first sets sys.path to ``path``, and then unpickles ``call``.
    """

    path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True)
class RankResult:
    """The result of the function on one rank: its return value or its exception."""

    value: bytes = b""  # the return value, pickled by cloudpickle
    error: bytes = b""  # the exception, pickled by cloudpickle; b"": it cannot be pickled, or there is none
    text: str = ""  # type and message of the exception; "": no exception was raised
    trace: str = ""  # the traceback as Python prints it
    secondary: bool = False  # the exception only reports that another rank was lost


def nameless_file() -> int:
    """Return a descriptor of a new empty file without a name.

    The file is in memory if the system supports this, otherwise in the directory for temporary files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddl-exchange")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data`` to the file ``fd``, in several system calls: one system call writes at most 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:_CHUNK_BYTES]) :]


def read_all(fd: int) -> bytes:
    """Return the whole contents of the file ``fd``, from its beginning.

    The file's current offset is neither used nor changed, because all processes that inherited the file share the
    offset.
    """
    parts, at = [], 0
    while data := os.pread(fd, _CHUNK_BYTES, at):
        parts.append(data)
        at += len(data)
    return b"".join(parts)
