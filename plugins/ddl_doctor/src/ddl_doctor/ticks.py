"""Choose the round numbers for the labels on the axis of a chart. This module draws nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_LABELLED = 3  # number of labels on a logarithmic axis: with fewer labels, a reader cannot see the scale
# Sets of round numbers that may be labelled within each power of ten, from few to many.
_MANTISSAS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))


def linear_ticks(high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` numbers from 0 to ``high`` for the labels of a linear axis.

    The distance between two numbers is 1, 2 or 5 times a power of ten. If ``high`` is not a positive finite number,
    return only 0.
    """
    if not 0 < high < math.inf:
        return [0.0]
    exponent = math.floor(math.log10(high / most))
    steps = (digit * 10.0**power for power in (exponent, exponent + 1) for digit in (1, 2, 5))
    step = next(one for one in steps if high / one * (1 + 1e-9) < most)
    return [float(f"{i * step:.6g}") for i in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def spread(values: Sequence[int], gaps: int) -> list[int]:
    """Select some of ``values``, so that their labels on a logarithmic axis do not touch each other.

    ``values`` must be positive and in ascending order. The result contains the smallest and the largest value. The
    distance between two values in the result is at least 1 / ``gaps`` of the length of the axis.
    """
    kept = list(values[:1])
    least = math.log(values[-1] / values[0]) / gaps * (1 - 1e-9) if values else 0.0
    for value in values[1:-1]:
        if min(math.log(value / kept[-1]), math.log(values[-1] / value)) >= least:
            kept.append(value)
    return [*kept, values[-1]] if len(values) > 1 else kept


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high`` for the labels of a logarithmic axis.

    ``low`` and ``high`` must be positive. The result has three or more numbers if ``high`` is at least four times
    ``low``.
    """
    found: list[float] = []
    for mantissas in _MANTISSAS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = (float(f"{digit}e{power}") for power in powers for digit in mantissas)
        found = [one for one in every if low <= one <= high]
        if len(found) >= _LEAST_LABELLED:
            break
    return found
