"""Defines the time limits for stalls. The coordinator and the waiting rank use the same limits."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_S = 2.0  # a control thread answers immediately; a stopped process does not
LEAST_ANSWER_S = 0.5


@dataclass(frozen=True)
class Patience:
    """The time limits for stalls.

    A stall is reported after ``warning_s`` seconds and ends the job after ``shutdown_s`` seconds; 0 means never.
    ``stacks`` says whether the report contains the Python stacks of the ranks for which other ranks wait. ``evicts``
    says that the job is elastic, so it goes on without the ranks that do not answer.
    """

    warning_s: float = 60.0
    shutdown_s: float = 0.0
    stacks: bool = False
    evicts: bool = False

    @property
    def answer_s(self) -> float:
        """Return the number of seconds within which a rank must answer; after that the rank counts as silent."""
        least_s = min((limit_s for limit_s in (self.warning_s, self.shutdown_s) if limit_s > 0), default=0.0)
        return min(ANSWER_S, max(LEAST_ANSWER_S, least_s / 2))
