"""How sure one can be that one way is faster than another, from pairs that were measured in alternation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["Gain", "gain_of"]

# One-sided 99 % points of Student's t by degrees of freedom; in between the smaller number of degrees counts.
_T99 = {
    1: 31.82, 2: 6.965, 3: 4.541, 4: 3.747, 5: 3.365, 6: 3.143, 7: 2.998, 8: 2.896, 9: 2.821, 10: 2.764,
    12: 2.681, 15: 2.602, 20: 2.528, 30: 2.457, 60: 2.390,
}  # fmt: skip


@dataclass(frozen=True)
class Gain:
    """What is saved of a step's time, as a part of it: 0.1 is a tenth. ``lower``: with 99 % certainty at least so much."""

    mean: float
    lower: float
    pairs: int

    @property
    def sure(self) -> bool:
        """Whether it is one, beyond noise."""
        return self.lower > 0.0


def gain_of(before: Sequence[float], after: Sequence[float]) -> Gain:
    """From step times in seconds, ``before[i]`` and ``after[i]`` measured next to each other. At least two pairs.

    By the logarithms of their ratios: a disturbance that takes a part of the time counts alike on both sides.
    """
    ratios = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    if len(ratios) < 2:
        raise ValueError(f"{len(ratios)} pairs say nothing of their spread; measure at least two")
    mean = fmean(ratios)
    degrees = max(one for one in _T99 if one <= len(ratios) - 1)
    lower = mean - _T99[degrees] * stdev(ratios) / math.sqrt(len(ratios))
    return Gain(1.0 - math.exp(-mean), 1.0 - math.exp(-lower), len(ratios))
