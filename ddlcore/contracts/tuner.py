"""The tuner contract: proposes settings, is told how long a step took with them, and proposes better ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.types import Knob, Value

__all__ = ["Knob", "Tuner", "Value"]


class Tuner(ABC):
    """A search over ``knobs``, which minimises. Deterministic for one seed; one thread at a time; no clock."""

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        self.knobs = tuple(knobs)
        self.seed = seed

    @abstractmethod
    def ask(self) -> dict[str, Value] | None:
        """The settings to try next, one value for each knob; None when nothing is left to learn."""

    @abstractmethod
    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        """What a step cost with ``values``, in seconds.

        Values that it never proposed are welcome too (a warm start), also beyond a range: they count as its end.
        """
