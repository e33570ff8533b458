"""The store of ddl's world, as torch uses stores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ddl_torch.distributed.uncompiled import uncompiled
from ddlcore.api.framework_groups import world_store
from ddlcore.errors import DeadlineExceeded


@uncompiled
class DdlStore(dist.Store):  # type: ignore[misc]  # torch's class has no types
    """The part of this world's store whose keys begin with ``prefix``. All ranks of the world share it.

    The values are kept by ddl's coordinator: under ``ddl run``, no rank takes them along when it ends. Each wait raises
    PeerLost if a rank of the world dies. ``timeout``: of waits for which the caller gives no other.
    """

    def __init__(self, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._part = world_store(f"torch.distributed/{prefix}/")
        self._wait_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        self._part.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._part.get(key, self._wait_s)

    def add(self, key: str, amount: int) -> int:
        return self._part.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return all(map(self._has, keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist. Raises DeadlineExceeded after ``timeout``, and PeerLost if a rank dies."""
        deadline_s = time.monotonic() + (self._wait_s if timeout is None else timeout.total_seconds())
        for key in keys:
            self._part.get(key, max(0.0, deadline_s - time.monotonic()))

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._wait_s)

    def _has(self, key: str) -> bool:
        try:
            self._part.get(key, 0.0)
        except DeadlineExceeded:
            return False
        return True
