"""Define the interface of an object that observes a job of ``ddl run`` and may end it or take over the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ddlcore.launch.output.screen import Screen
from ddlcore.messages import Profile, Pulse


class Watch(Protocol):
    """An observer of one job. The main thread calls all methods except ``heard``."""

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return the screens for the job's stdout and stderr, which replace ``screens``."""

    def begin(self, say: Callable[[str], None], stop: Callable[[], None]) -> None:
        """Begin to watch the job, whose ranks have been started.

        ``say(text)`` shows a line to the user, and ``stop()`` kills all ranks. Any thread may call both.
        """

    def heard(self, rank: int, message: Pulse | Profile) -> None:
        """Take a message that ``rank`` sent about itself. Must be quick: the control server's thread calls it."""

    def worlds(self, status: Callable[[], str]) -> None:
        """Take a function that describes the present world of an elastic job in one line. Any thread may call it.

        It is called before ``begin``, and only for an elastic job.
        """

    def end(self) -> None:
        """End the watch: the ranks have ended and all their output was shown, or no rank was started."""
