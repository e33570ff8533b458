"""The store of a measurement: files in a directory that the hosts of a test cluster share."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded

__all__ = ["FileStore"]

POLL_S = 0.005


class FileStore(Store):
    """A store with one file for each key, for processes of one user during a measurement."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, key: str) -> Path:
        return self._directory / key.encode().hex()

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_bytes(value)
        half.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > until_s:
                    raise DeadlineExceeded(f"nobody has put {key} into the store") from None
                time.sleep(POLL_S)

    def add(self, key: str, amount: int) -> int:
        with open(self._directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._path(key)
            total = amount + (int(path.read_bytes()) if path.exists() else 0)
            self.set(key, str(total).encode())
            return total

    def delete(self, prefix: str) -> None:
        for path in self._directory.iterdir():
            if path.name.startswith(prefix.encode().hex()):
                path.unlink(missing_ok=True)
