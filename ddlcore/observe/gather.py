"""Brings the ranks' parts to rank 0 over the job's store, where no launcher waits for them."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError

__all__ = ["collect", "send"]


def send(store: Store, key: str, path: Path, shared: bool) -> None:
    """A rank's part is complete. ``shared``: rank 0 is on this host and can read it where it is."""
    with contextlib.suppress(DdlInternalError, OSError):  # who cannot be told any more does not need it
        store.set(key, b"" if shared else zlib.compress(path.read_bytes(), 1))


def collect(store: Store, prefix: str, ranks: Iterable[int], directory: Path, timeout_s: float) -> list[int]:
    """On rank 0: waits for what ``ranks`` send, and writes there what does not stand there. Returns who is missing."""
    missing = []
    deadline_s = time.monotonic() + timeout_s
    for rank in ranks:
        try:
            data = store.get(f"{prefix}{rank}", max(deadline_s - time.monotonic(), 0.0))
            if data:
                (directory / f"rank{rank}.json").write_bytes(zlib.decompress(data))
        except (DdlInternalError, OSError, zlib.error):
            missing.append(rank)
    with contextlib.suppress(DdlInternalError):
        store.delete(prefix)
    return missing
