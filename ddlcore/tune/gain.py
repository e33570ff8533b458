"""Compute how much faster one combination of settings is than another, and whether the difference is certain.

The combinations are measured alternately, so that the times form pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# One-sided 99 % points of Student's t by degrees of freedom; other degrees use the next smaller entry.
_T99 = {
    1: 31.82, 2: 6.965, 3: 4.541, 4: 3.747, 5: 3.365, 6: 3.143, 7: 2.998, 8: 2.896, 9: 2.821, 10: 2.764,
    12: 2.681, 15: 2.602, 20: 2.528, 30: 2.457, 60: 2.390,
}  # fmt: skip


@dataclass(frozen=True)
class Gain:
    """The share of a step's time that is saved; 0.1 means a tenth of the time.

    ``mean`` is the estimate of the share. With 99 % certainty, the share is at least ``lower``. ``pairs`` is the number
    of pairs that were measured.
    """

    mean: float
    lower: float
    pairs: int

    @property
    def sure(self) -> bool:
        """Whether it is certain that there is a gain, and not only noise."""
        return self.lower > 0.0


def gain_of(before: Sequence[float], after: Sequence[float]) -> Gain:
    """Return the gain of the settings ``after`` over the settings ``before``, from step times in seconds.

    ``before[i]`` and ``after[i]`` are a pair that was measured one right after the other. The gain is computed from the
    logarithms of ratios. So a disturbance by a certain factor has the same weight in ``before`` as in ``after``. Raises
    ValueError for fewer than two pairs.
    """
    ratios = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    if len(ratios) < 2:
        raise ValueError(f"{len(ratios)} pairs do not show how results vary; measure at least two pairs")
    mean = fmean(ratios)
    degrees = max(one for one in _T99 if one <= len(ratios) - 1)
    lower = mean - _T99[degrees] * stdev(ratios) / math.sqrt(len(ratios))
    return Gain(1.0 - math.exp(-mean), 1.0 - math.exp(-lower), len(ratios))
