"""The tuner contract: how a tuner proposes settings, gets the measured duration of a step, and proposes better ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.types import Knob, Value

__all__ = ["Knob", "Tuner", "Value"]


class Tuner(ABC):
    """A search for values of ``knobs`` with which a step takes the least time.

    ``knobs``: the settings that the search may change. Equal seeds and equal calls give equal results. A tuner reads no
    clock. One thread at a time may use a tuner.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        self.knobs = tuple(knobs)
        self.seed = seed

    @abstractmethod
    def ask(self) -> dict[str, Value] | None:
        """Return the settings to try next, with one value for each knob; None if no further trial would help."""

    @abstractmethod
    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        """Record that a step has taken ``cost`` seconds with the settings ``values``.

        The settings need not have been proposed by this tuner; for example, they may be from an earlier search. A value
        outside a knob's range counts as the nearest end of the range.
        """
