"""Copy the ranks' parts of a timeline to rank 0 through the job's store. Used if no launcher of ddl collects them."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError


def send(store: Store, key: str, path: Path, shared: bool) -> None:
    """Send this rank's part of the timeline to rank 0: store the content of the file ``path`` under ``key``.

    If ``shared`` is true, rank 0 can read the file directly, so an empty value is stored. Errors are ignored.
    """
    with contextlib.suppress(DdlInternalError, OSError):  # if rank 0 has ended, it does not need the part
        store.set(key, b"" if shared else zlib.compress(path.read_bytes(), 1))


def collect(store: Store, prefix: str, ranks: Iterable[int], directory: Path, timeout_s: float) -> list[int]:
    """Wait for the parts of ``ranks``, and write them to ``directory``. Return the ranks whose parts are missing.

    Call this on rank 0. The keys in the store are ``prefix`` followed by the rank. If a rank has sent an empty value,
    its part is already in ``directory``. The whole wait takes at most ``timeout_s`` seconds.
    """
    missing = []
    deadline_s = time.monotonic() + timeout_s
    for rank in ranks:
        try:
            data = store.get(f"{prefix}{rank}", max(deadline_s - time.monotonic(), 0.0))
            if data:
                (directory / f"rank{rank}.json").write_bytes(zlib.decompress(data))
        except (DdlInternalError, OSError, zlib.error):
            missing.append(rank)
    return missing


def has(store: Store, key: str, timeout_s: float) -> bool:
    """Return whether ``key`` has a value within ``timeout_s`` seconds. Return False if the store cannot be read."""
    try:
        store.get(key, timeout_s)
    except DdlInternalError:
        return False
    return True


def forget(store: Store, prefix: str) -> None:
    """Delete all keys that begin with ``prefix``. Errors are ignored."""
    with contextlib.suppress(DdlInternalError):
        store.delete(prefix)
