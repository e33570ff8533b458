"""What was measured, and what follows from it: medians, ratios and how far they are certain. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TRANSPORT", "WHOLE", "Ratio", "Row", "median_interval", "ratio"]

TRANSPORT = "transport"  # the open communicator alone, called as the engine calls it
WHOLE = "ddl"  # the verb, from the user's array to the user's array
_CERTAIN = 0.95


@dataclass(frozen=True)
class Row:
    """One collective at one size."""

    operation: str
    nbytes: int  # of the whole tensor: what a rank reduces or sends on, or has in the end, whichever is larger
    times: Mapping[str, Sequence[float]]  # contender -> seconds a call of the slowest rank, by round
    replayed: float = 0.0  # the share of whole calls that ran from memory

    def median_s(self, name: str) -> float:
        return statistics.median(self.times[name])

    def gbytes_per_s(self, name: str) -> float:
        """10⁹ bytes of the tensor a second, whatever the algorithm moves for it."""
        return self.nbytes / self.median_s(name) / 1e9

    def as_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "nbytes": self.nbytes,
            "times_s": {name: list(values) for name, values in self.times.items()},
            "replayed": self.replayed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(data["operation"], data["nbytes"], data["times_s"], data["replayed"])


@dataclass(frozen=True)
class Ratio:
    """A median of ratios taken round by round, and the interval that holds the true one."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_figure(self.middle)} [{_figure(self.low)}, {_figure(self.high)}]"


def ratio(row: Row, slow: str, fast: str) -> Ratio:
    """How many times longer ``slow`` takes than ``fast``, each round compared with itself."""
    ratios = [s / f for s, f in zip(row.times[slow], row.times[fast])]
    return Ratio(statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, without any assumption on how ``values`` are spread (order statistics).

    With fewer than six values there is none: then the least and the greatest.
    """
    ordered, count = sorted(values), len(values)
    tail, skip = 0.0, 0
    for outside in range(count // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - _CERTAIN:
            break
        skip = outside
    return ordered[skip], ordered[-1 - skip]


def _figure(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
