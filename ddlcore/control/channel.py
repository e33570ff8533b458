"""Define the interface of a rank's connection to the coordinator.

The connection carries whole messages in their order and does not interpret them. One implementation uses sockets, and
another works within one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator


class Channel(ABC):
    """A connection of one rank to the coordinator.

    Any thread may call ``wake``. Only one thread at a time may call the other methods: in a world the control thread,
    before it the thread that registers.
    """

    @abstractmethod
    def send(self, message: ToCoordinator) -> None:
        """Send ``message`` without blocking. Raises Closed if ``close`` was called before."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        """Wait at most ``timeout_s`` for a message, and return all messages that have arrived.

        Returns [] after the timeout, or if another thread called ``wake``. Raises DdlInternalError if the coordinator
        is gone and earlier calls have returned all its messages. Raises Closed if ``close`` was called before.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the call of ``receive`` that is in progress return soon. If there is none, the next call returns soon.

        Any thread may call this. Several calls of ``wake`` before ``receive`` returns have the effect of one call.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait until all sent messages have arrived, but at most 200 ms; then close the connection.

        Further calls do nothing.
        """
