"""The tuner contract: a tuner proposes settings, learns how long a step took with them, and proposes better ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.types import Knob, Value

__all__ = ["Knob", "Tuner", "Value"]


class Tuner(ABC):
    """A search for values of ``knobs`` with which a step takes the least time.

    Equal seeds give equal results. It reads no clock, and one thread at a time may use it.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        self.knobs = tuple(knobs)
        self.seed = seed

    @abstractmethod
    def ask(self) -> dict[str, Value] | None:
        """Return the settings to try next, one value for each knob; None if no further trial would help."""

    @abstractmethod
    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        """Take the cost of ``values``: how many seconds a step took with these settings.

        Values that this tuner never proposed are accepted too, for example from an earlier search. A value outside a
        knob's range counts as the nearest end of the range.
        """
