"""Somebody who looks on while `ddl run` runs a job: hears how ranks are, may end them, may have the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ddlcore.launch.screen import Screen
from ddlcore.messages import Profile, Pulse

__all__ = ["Watch"]


class Watch(Protocol):
    """One job's. The main thread calls, but for ``heard``."""

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Where the job's stdout and stderr go, instead of these."""

    def begin(self, say: Callable[[str], None], stop: Callable[[], None]) -> None:
        """The ranks run. ``say`` shows a line, ``stop`` kills all ranks; both from any thread."""

    def heard(self, rank: int, message: Pulse | Profile) -> None:
        """What a rank tells of itself. In the control server's thread: it must be short."""

    def end(self) -> None:
        """The ranks have ended, and all that they wrote was shown. Also where none was started."""
