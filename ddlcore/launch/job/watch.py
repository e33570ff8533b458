"""Define the interface of an object that observes a job of ``ddl run``.

Such an object may also end the job, or replace the screens on which the job's output is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ddlcore.launch.output.screen import Screen
from ddlcore.messages import Profile, Pulse


class Watch(Protocol):
    """The interface of an observer of one job. The main thread calls all methods except ``heard``."""

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return the two screens on which the job's stdout and stderr are shown in place of ``screens``."""

    def begin(self, say: Callable[[str], None], stop: Callable[[], None]) -> None:
        """Begin to watch the job, whose ranks have been started.

        The observer may call ``say(text)`` to show a line to the user, and ``stop()`` to kill all ranks. Any thread may
        call these two functions.
        """

    def heard(self, rank: int, message: Pulse | Profile) -> None:
        """Handle a message in which ``rank`` reports its own state.

        The control server's thread calls this method, so the method must return quickly.
        """

    def worlds(self, status: Callable[[], str]) -> None:
        """Store ``status``, a function that returns one line of text about the present world of an elastic job.

        This method is called before ``begin``, and only for an elastic job. Any thread may call ``status``.
        """

    def end(self) -> None:
        """Stop watching the job.

        This is called after all ranks have ended and all their output was shown, or if no rank was started.
        """
