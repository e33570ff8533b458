"""Writes files whole or not at all, under names on the way that nobody can guess and no link of another's leads away."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new empty file beside ``path``, to be written by its name; it takes the place of ``path`` at the end.

    Where the body raises, nothing is left of it and ``path`` is as it was. The file is created exclusively, with
    ``mode`` less the umask. Raises OSError.
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
