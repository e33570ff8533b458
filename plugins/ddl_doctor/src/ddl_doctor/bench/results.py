"""Store the times that were measured, and compute medians, ratios and the confidence intervals of the ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddl_doctor.sizes import three_digits

TRANSPORT = "transport"  # the open communicator alone, called as the engine calls it
WHOLE = "ddl"  # ddl's whole call, from the user's array to the user's array
_CERTAIN = 0.95


@dataclass(frozen=True)
class MeasuredRow:
    """The measured times of one collective at one size, by contender and round."""

    operation: str
    nbytes: int  # of the whole tensor: the larger of a rank's source and target
    times: Mapping[str, Sequence[float]]  # contender -> seconds per call on the slowest rank, by round
    replayed: float = 0.0  # share of the whole calls that were replayed

    def median_s(self, name: str) -> float:
        """Return the median of the seconds of the contender ``name``."""
        return statistics.median(self.times[name])

    def gbytes_per_s(self, name: str) -> float:
        """Return the size of the tensor divided by the median time of contender ``name``, in 10⁹ bytes per second.

        It does not matter how many bytes the algorithm sends.
        """
        return self.nbytes / self.median_s(name) / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return what `ddl bench --json` prints of this row."""
        return {
            "operation": self.operation,
            "nbytes": self.nbytes,
            "times_s": {name: list(values) for name, values in self.times.items()},
            "replayed": self.replayed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeasuredRow:
        return cls(data["operation"], data["nbytes"], data["times_s"], data["replayed"])


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all rounds (``middle``), with the interval that ``median_interval`` returns."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{three_digits(self.middle)} [{three_digits(self.low)}, {three_digits(self.high)}]"


def ratio(row: MeasuredRow, slow: str, fast: str) -> Ratio:
    """Return how many times longer the contender ``slow`` takes than the contender ``fast``.

    The two times of the same round are divided by each other; the result is the median of these ratios.
    """
    ratios = [s / f for s, f in zip(row.times[slow], row.times[fast])]
    return Ratio(statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper end of the 95 % confidence interval of the median of ``values``.

    The interval comes from order statistics, so it is valid for every distribution. Fewer than six values have no such
    interval. For them, the smallest and the largest value are returned.
    """
    ordered, count = sorted(values), len(values)
    tail, skip = 0.0, 0
    for outside in range(count // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - _CERTAIN:
            break
        skip = outside
    return ordered[skip], ordered[-1 - skip]


def interval_words(rounds: int) -> str:
    """Return the name under which users see the interval that ``median_interval`` returns for ``rounds`` values."""
    return "95 % interval of the median" if 2 / 2**rounds <= 1 - _CERTAIN else "least and greatest"
