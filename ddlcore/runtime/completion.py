"""Announces to waiting threads that operations have ended. This module does not know how these threads wait."""

from __future__ import annotations

from _thread import LockType
from collections import deque

from ddlcore.reentry import Lock


class Completion:
    """Announces finished operations to waiting threads. All handles of a job share one such object.

    ``observed`` is the highest index of a bucket whose end the user's code has seen. It is -1 if there is no such
    bucket.
    """

    def __init__(self) -> None:
        self.lock = Lock()  # protects the state of all handles
        self.waiting: deque[LockType] = deque()  # a lock of each waiting thread, which ``announce`` releases
        self.observed = -1
        self.wanting: dict[object, None] = {}  # a key for each thread that waits for something on a device

    def announce(self) -> None:
        """Wake all waiting threads, because an operation has ended. Any thread may call this.

        The call has no effect on a thread that does not wait any more.
        """
        waiting = self.waiting
        try:  # contextlib.suppress would take longer than everything else here
            while waiting:
                waiting.popleft().release()
        except IndexError:  # another thread is in ``announce`` as well and took the last lock
            pass

    @property
    def wanted(self) -> bool:
        """Return whether any thread waits for the end of an operation on a device."""
        return bool(self.wanting)

    def observe(self, index: int) -> None:
        """Record that the user's code has seen the end of the bucket with the coordinator's index ``index``."""
        if index > self.observed:
            self.observed = index
