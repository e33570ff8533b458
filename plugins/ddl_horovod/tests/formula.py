"""The adaptive sum by the formula of the paper, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["folded", "reference", "summed"]


def reference(vectors: Sequence[Any]) -> Any:
    """The sum of the sums of two halves, of which there are as many as a power of two."""
    if len(vectors) == 1:
        return np.asarray(vectors[0], np.float64)
    half = len(vectors) // 2
    a, b = reference(vectors[:half]), reference(vectors[half:])
    product = float((a * b).sum())
    of = [float((one * one).sum()) for one in (a, b)]
    factors = [1.0 - product / (2.0 * square) if square else 1.0 for square in of]
    return factors[0] * a + factors[1] * b


def folded(vectors: Sequence[Any]) -> list[Any]:
    """As many vectors as a power of two: each that is too many is combined with one of the first beforehand."""
    active = 1 << (len(vectors).bit_length() - 1)
    return [
        reference([vectors[at], vectors[at + active]]) if at + active < len(vectors) else vectors[at]
        for at in range(active)
    ]


def summed(vectors: Sequence[Any]) -> Any:
    """The adaptive sum of any number of vectors."""
    return reference(folded(vectors))
