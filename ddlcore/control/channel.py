"""Define a rank's connection to the coordinator, which carries whole messages in order, whatever the transport.

It does not interpret the messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.messages import FromCoordinator, ToCoordinator


class Channel(ABC):
    """A connection of one rank to the coordinator.

    Only the control thread uses it, except that any thread may call ``wake``.
    """

    @abstractmethod
    def send(self, message: ToCoordinator) -> None:
        """Send ``message`` without blocking. Raises Closed after ``close``."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        """Wait at most ``timeout_s`` for a message, and return all messages that have arrived.

        Returns [] at the timeout or after ``wake``. Raises DdlInternalError if the coordinator is gone and all its
        messages have been returned, and Closed after ``close``.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the ``receive`` in progress return soon; if none is in progress, the next one.

        Any thread may call this. Several calls before that ``receive`` returns count as one.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection when all sent messages have arrived, or after 200 ms. May be called again."""
