"""Lets the host wait, with a deadline, for work that was queued on a device. An abort ends the wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddlcore.contracts.device import Event
from ddlcore.contracts.transport import Work

SLICE_S = 0.05  # how often a waiting thread checks for an abort


class QueuedWork(Work):
    """Work that is complete when ``event`` is done, unless ``check`` raises an exception.

    ``check`` is called during the wait and again when the event is done. Its argument is ``what``, the name of the call
    that queued the work. The last check is necessary because, after an abort, the queue continues until the event, but
    with garbage in the memory. ``kept`` is an object that stays alive with this one.
    """

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
