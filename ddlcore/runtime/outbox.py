"""Stores a rank's messages to the coordinator until the control thread sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ddlcore.messages.to_coordinator import ToCoordinator


class Outbox:
    """The messages of one rank that are not yet sent, in order. Any thread may add a message, and does not wait."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create an empty outbox. ``wake`` must make the control thread call ``taken`` soon."""
        self.wake = wake
        self._messages: deque[ToCoordinator] = deque()

    def say(self, message: ToCoordinator) -> None:
        """Have ``message`` sent to the coordinator as soon as possible."""
        self._messages.append(message)
        self.wake()

    def taken(self) -> Iterator[ToCoordinator]:
        """Remove the messages and yield them in order, including messages that are added during the iteration."""
        while self._messages:
            yield self._messages.popleft()
