"""Define what the control network expects of the coordinator: to take messages and return messages, without any I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ddlcore.messages import FromCoordinator, ToCoordinator

Outgoing = list[tuple[int, FromCoordinator]]  # (world rank in the launch, message to it), in the order of sending


class CoordinatorProtocol(Protocol):
    """The coordinator as the network sees it. Only one thread at a time calls it; all ranks are ranks of the launch."""

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing:
        """Handle a message from ``rank`` and return the messages to send because of it.

        Raises DdlInternalError if the message is not allowed at this time; the coordinator is then unchanged.
        """

    def rank_ended(self, rank: int, reason: str, certain: bool = True) -> Outgoing:
        """Handle the end of the process of ``rank``, clean or not, and return the messages to send because of it.

        ``reason`` says how it ended, in words for the user. The coordinator decides whether this end is a failure.
        ``certain`` is false if the host of the rank is only silent, so that the process may live.
        """

    def rank_started(self, rank: int, host: int = -1) -> Outgoing:
        """Handle the start of another process for ``rank``, whose process had ended; return the messages to send.

        ``host`` is the index of its host; -1 stands for the host of the last process.
        """

    def dismiss(self, ranks: Collection[int], reason: str) -> Outgoing:
        """Handle the wish that ``ranks`` leave the training of an elastic job; return the messages to send.

        ``reason`` says why, in words for the user.
        """

    def lost(self) -> dict[int, str]:
        """Return all ranks that were lost so far, each with the reason. A rank that is in the table stays in it."""

    def due(self) -> Outgoing:
        """Return the messages that are due at the time that was last given to ``overdue``."""

    def overdue(self, now_s: float) -> list[str]:
        """Return lines for the user about what has been waiting for too long.

        The network calls this twice a second; ``now_s`` is the time of the monotonic clock.
        """
