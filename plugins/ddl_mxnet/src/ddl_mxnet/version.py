"""Sees to it that MXNet 1.9.1 can be imported; the one place that knows what it lacks with today's numpy."""

from __future__ import annotations

import numpy as np

__all__ = ["mend_numpy"]


def mend_numpy() -> None:
    """Gives numpy 1.24 to 1.26 back the name ``numpy.bool``, which MXNet 1.9.1 asks for: Python's own, as before."""
    if "bool" not in vars(np):  # not hasattr, which would warn
        np.bool = bool  # type: ignore[attr-defined]
