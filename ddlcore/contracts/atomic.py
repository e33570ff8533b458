"""Replaces files atomically, through a temporary file whose name nobody can guess and which is never a link."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new empty file in the directory of ``path``, and rename it to ``path`` when the ``with`` block ends.

    The block writes the file by its path. If the block raises, the new file is removed and ``path`` stays as it was.
    The file is created exclusively, with ``mode`` less the umask. Raises OSError.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
    try:
        yield new
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
