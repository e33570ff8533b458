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
        """Called when the ranks run.

        ``say`` shows a line, ``stop`` kills all ranks; both may be called by any thread.
        """

    def heard(self, rank: int, message: Pulse | Profile) -> None:
        """Take a message that a rank sent about itself. Called in the control server's thread, so it must be quick."""

    def end(self) -> None:
        """Called when the ranks have ended and all their output was shown, and also if no rank was started."""
