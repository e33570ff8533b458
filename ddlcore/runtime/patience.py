"""States after what time a stall is reported and ends the job; the coordinator and the waiting rank both use it."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_S = 2.0  # a control thread answers immediately; a stopped process does not
LEAST_ANSWER_S = 0.5


@dataclass(frozen=True)
class Patience:
    """The times after which a stall is reported and ends the job; 0 means never.

    ``stacks`` says whether to show where the ranks that others wait for are in their code. ``evicts``: the job is elastic,
    and goes on without the ranks that do not answer.
    """

    warning_s: float = 60.0
    shutdown_s: float = 0.0
    stacks: bool = False
    evicts: bool = False

    @property
    def answer_s(self) -> float:
        """Return within how many seconds a rank must answer before it counts as silent."""
        least_s = min((limit_s for limit_s in (self.warning_s, self.shutdown_s) if limit_s > 0), default=0.0)
        return min(ANSWER_S, max(LEAST_ANSWER_S, least_s / 2))
