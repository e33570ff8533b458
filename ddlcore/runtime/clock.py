"""Counts the time during which a watcher ran, which is less than the clock's time if the watcher was stopped."""

from __future__ import annotations

MOST_GAP_S = 2.5  # the watcher looks at least once a second; in a longer gap it was stopped itself
COUNTED_S = 0.5  # how much of such a gap is counted


class WatchedTime:
    """The seconds since the first call of ``at``, without the gaps in which the watcher did not run.

    A process may be stopped and continued (SIGSTOP and SIGCONT, or a suspended machine), and the other processes with
    it. By the clock it would then take its own pause for a silence of the other processes.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self.seconds = 0.0

    def at(self, now_s: float) -> float:
        """Return the watched time at ``now_s``. This is the reading of any steady clock, the same one in every call."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self.seconds += gap_s if gap_s <= MOST_GAP_S else COUNTED_S
        return self.seconds
