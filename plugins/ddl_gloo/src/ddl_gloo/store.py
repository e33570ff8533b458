"""Offers ddl's store by the interface that Gloo expects, so that Gloo need not open a port for a store of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded

_SLICE_S = 0.5


class Meeting(TorchStore):
    """The store that Gloo calls while ranks connect. Its waits end at ``until_s`` (of time.monotonic) at the latest.

    Errors of ddl's store (DeadlineExceeded, PeerLost) pass through Gloo unchanged, so that the constructor of Gloo's
    group raises them. ``said`` holds what this rank has published, and ``heard`` what it has read of all ranks; both
    include the addresses at which the ranks listen.
    """

    def __init__(self, store: Store, until_s: float, stopped: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._until_s = until_s
        self._stopped = stopped  # called twice a second
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value; any rank may wait for it."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.said.append(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for the value of ``key``, and return it."""
        value = self._awaited(key)
        self.heard.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Gloo's ``timeout`` starts anew with each call, so ``until_s`` is used instead.
        """
        for key in keys:
            self._awaited(key)

    def _awaited(self, key: str) -> bytes:
        while True:
            left_s = max(0.0, self._until_s - time.monotonic())
            try:
                return self._store.get(key, min(left_s, _SLICE_S))
            except DeadlineExceeded:
                if left_s <= _SLICE_S or self._stopped():
                    raise
