"""Counts the time during which the watcher ran, which is less than the clock's time if the watcher was stopped."""

from __future__ import annotations

MOST_GAP_S = 2.5  # the watcher looks at least once a second; in a longer gap it was stopped itself
COUNTED_S = 0.5  # how much of such a gap is counted


class WatchedTime:
    """The seconds since the first look, without the gaps in which nobody looked.

    A process that was stopped and continued (SIGSTOP and SIGCONT, or a suspended machine) would otherwise take its own
    pause for a silence of the other processes, which were stopped with it.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self.seconds = 0.0

    def at(self, now_s: float) -> float:
        """Return the watched time at ``now_s``, which may come from any steady clock."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self.seconds += gap_s if gap_s <= MOST_GAP_S else COUNTED_S
        return self.seconds
