"""A rank's line to the coordinator: whole messages in order, whatever the wire; it never reads what they say."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.messages import FromCoordinator, ToCoordinator

__all__ = ["Channel"]


class Channel(ABC):
    """One user: the control thread. Only ``wake`` may be called by others."""

    @abstractmethod
    def send(self, message: ToCoordinator) -> None:
        """Hands ``message`` over; never waits. Raises Closed after ``close``."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        """What has arrived, after a wait of at most ``timeout_s`` for the first; [] at the timeout or after ``wake``.

        Raises DdlInternalError when the coordinator is gone (once all that had arrived was returned),
        Closed after ``close``.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes ``receive`` return soon: the one under way, else the next. Any thread; many calls count as one."""

    @abstractmethod
    def close(self) -> None:
        """Ends the line when what was sent has arrived, or after 200 ms. May be repeated."""
