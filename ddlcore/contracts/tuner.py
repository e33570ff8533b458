"""The tuner contract: proposes settings, learns how long a step took with them, and proposes better ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.types import Knob, Value

__all__ = ["Knob", "Tuner", "Value"]


class Tuner(ABC):
    """A search over ``knobs`` that minimises the cost of a step.

    It is deterministic for a given seed, reads no clock, and is used by one thread at a time.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        self.knobs = tuple(knobs)
        self.seed = seed

    @abstractmethod
    def ask(self) -> dict[str, Value] | None:
        """Return the settings to try next, one value per knob; None if nothing is left to learn."""

    @abstractmethod
    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        """Report what a step cost with ``values``, in seconds.

        Values that this tuner never proposed are accepted too (a warm start). A value outside a knob's range counts as
        the nearer end of the range.
        """
