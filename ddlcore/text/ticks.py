"""Choose the round numbers at which the axis of a chart is labelled. Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_LABELLED = 3  # labels on a logarithmic axis: with fewer, a reader cannot tell the scale
# How many round numbers of each power of ten are labelled, from few to many.
_MANTISSAS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))


def linear_ticks(high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` multiples of 1, 2 or 5 times a power of ten, from 0 to ``high``.

    If ``high`` is not positive, only 0 is returned.
    """
    if not 0 < high < math.inf:
        return [0.0]
    exponent = math.floor(math.log10(high / most))
    steps = (digit * 10.0**power for power in (exponent, exponent + 1) for digit in (1, 2, 5))
    step = next(one for one in steps if high / one * (1 + 1e-9) < most)
    return [float(f"{i * step:.6g}") for i in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def spread(values: Sequence[int], gaps: int) -> list[int]:
    """Return those of these rising, positive values whose labels do not touch on a logarithmic axis.

    The smallest and the largest are included. Any two are at least 1 / ``gaps`` of the axis apart.
    """
    kept = list(values[:1])
    least = math.log(values[-1] / values[0]) / gaps * (1 - 1e-9) if values else 0.0
    for value in values[1:-1]:
        if min(math.log(value / kept[-1]), math.log(values[-1] / value)) >= least:
            kept.append(value)
    return [*kept, values[-1]] if len(values) > 1 else kept


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``, both positive, for a logarithmic axis.

    There are three or more if ``high`` is at least four times ``low``.
    """
    found: list[float] = []
    for mantissas in _MANTISSAS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = (float(f"{digit}e{power}") for power in powers for digit in mantissas)
        found = [one for one in every if low <= one <= high]
        if len(found) >= _LEAST_LABELLED:
            break
    return found
