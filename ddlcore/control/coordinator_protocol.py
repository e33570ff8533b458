"""Define the interface by which the control network calls the coordinator.

The coordinator handles a message and returns the messages that the network must send. The coordinator does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import Outgoing


class CoordinatorProtocol(Protocol):
    """The interface of the coordinator for the control network. Only one thread at a time calls its methods.

    All ranks in arguments and results are launched ranks, not their numbers in a world.
    """

    def handle(self, rank: LaunchedRank, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        """Handle ``message`` from ``rank``, and return the messages to send because of this message.

        Raises DdlInternalError if the message is not allowed at this time. The coordinator is unchanged then.
        """

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        """Handle the end of the process of ``rank``, clean or not, and return the messages to send because of it.

        ``reason`` says how it ended, in words for the user. The coordinator decides whether this end is a failure.
        ``certain`` is false if the host of the rank is only silent, so that the process may live.
        """

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> Outgoing[LaunchedRank]:
        """Handle the start of a new process for ``rank``, whose earlier process has ended; return the messages to send.

        ``host`` is the index of the new process's host. -1 means the host of the earlier process.
        """

    def dismiss(self, ranks: Collection[LaunchedRank], reason: str) -> Outgoing[LaunchedRank]:
        """Handle the request that ``ranks`` leave the training of an elastic job; return the messages to send.

        ``reason`` says why the ranks must leave, in words for the user.
        """

    def lost(self) -> dict[LaunchedRank, str]:
        """Return the ranks that are lost at present, each with the reason in words for the user.

        A lost rank is no longer in the result after another process was started for it, or after it has registered for
        a new world.
        """

    def due(self) -> Outgoing[LaunchedRank]:
        """Return the messages that must be sent now because of the time.

        The coordinator uses ``now_s`` of the last call of ``overdue`` as the present time.
        """

    def overdue(self, now_s: float) -> list[str]:
        """Return lines of text that tell the user which operations have waited for too long.

        The network calls this method twice a second. ``now_s`` is the time of the monotonic clock in seconds.
        """
