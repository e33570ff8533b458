"""Define what the control network expects of the coordinator: messages in, messages out, no I/O of its own."""

from __future__ import annotations

from typing import Protocol

from ddlcore.messages import FromCoordinator, ToCoordinator

Outgoing = list[tuple[int, FromCoordinator]]  # (world rank in the launch, message to it), in the order of sending


class CoordinatorProtocol(Protocol):
    """The coordinator as the network sees it. One thread at a time calls it; ranks are those of the launch."""

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing:
        """Handle a message from ``rank`` and return the messages that follow from it.

        Raises DdlInternalError if the message was not allowed now; then it has changed nothing.
        """

    def rank_ended(self, rank: int, reason: str) -> Outgoing:
        """Handle the end of the process of ``rank``, clean or not, and return the messages that follow from it.

        The coordinator decides whether this end is a failure.
        """

    def lost(self) -> dict[int, str]:
        """Return all ranks that were lost so far, each with the reason; entries are only ever added."""

    def due(self) -> Outgoing:
        """Return the messages that are due at the time that was last given to ``overdue``."""

    def overdue(self, now_s: float) -> list[str]:
        """Return reports for the user about what has waited for too long.

        Called twice a second; ``now_s`` is monotonic.
        """
