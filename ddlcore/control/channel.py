"""Define a rank's connection to the coordinator: whole messages, in order, over any transport.

It does not interpret them.
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
        """Return the messages that have arrived, after waiting at most ``timeout_s`` for the first of them.

        Returns [] at the timeout or after ``wake``. Raises DdlInternalError when the coordinator is gone and all
        messages that had arrived were returned; Closed after ``close``.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make ``receive`` return soon: the call in progress, otherwise the next one.

        Any thread; many calls count as one.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection when all sent messages have arrived, or after 200 ms. May be called again."""
