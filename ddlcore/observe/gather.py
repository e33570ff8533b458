"""Copy the ranks' parts of a timeline to rank 0 through the job's store, if no launcher collects them."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError


def send(store: Store, key: str, path: Path, shared: bool) -> None:
    """Send this rank's part of the timeline, the complete file ``path``, to rank 0 under ``key``.

    ``shared`` says that rank 0 is on this host and can read the file directly, so that only the key is sent.
    """
    with contextlib.suppress(DdlInternalError, OSError):  # if rank 0 can no longer be told, it does not need the part
        store.set(key, b"" if shared else zlib.compress(path.read_bytes(), 1))


def collect(store: Store, prefix: str, ranks: Iterable[int], directory: Path, timeout_s: float) -> list[int]:
    """Wait for the parts of ``ranks`` and write them to ``directory``; return the ranks whose part is missing.

    Call this on rank 0. The part of a rank that could write to ``directory`` itself is only waited for. All together
    may take ``timeout_s``.
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
    with contextlib.suppress(DdlInternalError):
        store.delete(prefix)
    return missing
