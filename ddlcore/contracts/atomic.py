"""Replaces files atomically by means of a temporary file.

The name of the temporary file cannot be guessed, and the temporary file is never a link.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield the path of a new empty file beside ``path``, and rename the file to ``path`` when the ``with`` block ends.

    The block must write the new file. If the block raises an exception, the new file is removed and the file at
    ``path`` is not changed. The permissions of the new file are ``mode`` without the bits of the umask. Raises OSError
    if the new file cannot be created or renamed.
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
