"""Counts the time during which somebody watched, which is less than what a clock shows where the watcher itself stood still."""

from __future__ import annotations

__all__ = ["WatchedTime"]

MOST_GAP_S = 2.5  # who watches looks at least once a second; a longer gap is its own, and says nothing about others
COUNTED_S = 0.5  # of such a gap


class WatchedTime:
    """Seconds since the first look, without the gaps in which nobody looked.

    A process that was stopped and goes on (SIGSTOP and SIGCONT, a machine that was suspended) would else take its own
    pause for a silence of the others, which were stopped with it.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self.seconds = 0.0

    def at(self, now_s: float) -> float:
        """The watched time at ``now_s`` of any steady clock."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self.seconds += gap_s if gap_s <= MOST_GAP_S else COUNTED_S
        return self.seconds
