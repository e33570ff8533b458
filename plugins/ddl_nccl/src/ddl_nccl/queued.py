"""Waiting on the host for what was queued on a device, where somebody does: with a deadline, and ended by an abort."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddlcore.contracts.device import Event
from ddlcore.contracts.transport import Work

__all__ = ["Queued"]

SLICE_S = 0.05  # how often who waits looks whether it was aborted


class Queued(Work):
    """Complete when ``event`` has come, unless ``check`` then raises: an aborted call lets the queue go on, too."""

    def __init__(self, check: Callable[[str], None], event: Event, what: str, kept: object = None) -> None:
        self._check, self._event, self._what, self._kept = check, event, what, kept

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            come = self._event.wait(max(0.0, min(left_s, SLICE_S)))
            self._check(self._what)
            if come or left_s <= SLICE_S:
                return come
