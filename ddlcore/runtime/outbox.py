"""Holds a rank's messages to the coordinator until the control thread sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ddlcore.messages import ToCoordinator


class Outbox:
    """The messages of one rank that wait to be sent, in order. Any thread may add one, and none ever waits here."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create it empty. ``wake`` makes the control thread call ``taken`` soon."""
        self.wake = wake
        self._messages: deque[ToCoordinator] = deque()

    def say(self, message: ToCoordinator) -> None:
        """Have ``message`` sent as soon as possible."""
        self._messages.append(message)
        self.wake()

    def taken(self) -> Iterator[ToCoordinator]:
        """Remove and yield one message after the other, those included that are added meanwhile."""
        while self._messages:
            yield self._messages.popleft()
