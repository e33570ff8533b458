"""Counts the time during which a watcher ran. A watcher is code that watches how long other processes are silent.

If the watcher's own process was stopped for a while, the counted time is less than the time of the clock.
"""

from __future__ import annotations

MOST_GAP_S = 2.5  # the watcher looks at least once a second; in a longer gap it was stopped itself
COUNTED_S = 0.5  # how much of such a gap is counted


class WatchedTime:
    """The seconds since the first call of ``at``, without the gaps in which the watcher did not run.

    All processes may be stopped and continued together (SIGSTOP and SIGCONT, or a suspended machine). If the watcher
    used the time of the clock, the watcher would mistake its own pause for a silence of the other processes.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self.seconds = 0.0

    def at(self, now_s: float) -> float:
        """Return the watched time, in seconds, at the time ``now_s``.

        ``now_s`` is the time of a steady clock. All calls must use the same clock.
        """
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self.seconds += gap_s if gap_s <= MOST_GAP_S else COUNTED_S
        return self.seconds
