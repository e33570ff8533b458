"""What the control network expects of the machine that decides: messages in, messages out, no I/O of its own."""

from __future__ import annotations

from typing import Protocol

from ddlcore.messages import FromCoordinator, ToCoordinator

__all__ = ["CoordinatorProtocol", "Outgoing"]

Outgoing = list[tuple[int, FromCoordinator]]  # (world rank as launched, what it is told), in the order of sending


class CoordinatorProtocol(Protocol):
    """The coordinator as the network sees it. Called by one thread at a time; ranks are those of the launch."""

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing:
        """What follows from a message of ``rank``. DdlInternalError: it was out of place and changed nothing."""

    def rank_ended(self, rank: int, reason: str) -> Outgoing:
        """What follows from the end of ``rank``'s process, clean or not: the coordinator decides whether it is a loss."""

    def lost(self) -> dict[int, str]:
        """The ranks that were lost so far, with the reason of each; it only grows."""

    def due(self) -> Outgoing:
        """What ranks are to be told because of the time that ``overdue`` was given last."""

    def overdue(self, now_s: float) -> list[str]:
        """Reports for the user about what waits too long. Asked twice a second; ``now_s`` is monotonic."""
