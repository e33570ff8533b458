"""A rank of another host, as the launcher's supervisor watches it."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.launch.agents.wire import Signal, ToAgent


class RemoteRank:
    """A rank that an agent has started. A supervisor can watch it like a local rank: it implements ``Watched``."""

    process = None

    def __init__(self, rank: int, tell: Callable[[ToAgent], None]) -> None:
        self.rank = rank
        self._tell = tell

    def signal(self, number: int) -> None:
        """Tell the agent to send signal ``number`` only to the rank's own process."""
        self._tell(Signal(self.rank, number, False))

    def signal_group(self, number: int) -> None:
        """Tell the agent to send signal ``number`` to the rank's process and to all processes started by the rank."""
        self._tell(Signal(self.rank, number, True))

    def leaves_group(self) -> bool:
        """Return False, because the supervisor does not end the processes that the rank has left behind.

        The agent ends these processes, and sends Finished when they have ended.
        """
        return False
