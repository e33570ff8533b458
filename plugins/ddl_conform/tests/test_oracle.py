"""The oracle says how two values differ, also where they print alike."""

from __future__ import annotations

import numpy as np
import pytest
from ddl_conform.oracle import Array, difference


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (np.array([1, 2], np.int32), np.array([1, 3], np.int32), "2 instead of 3"),
        (np.array([2], np.uint8).view(bool), np.array([True]), "True (bytes 02) instead of True (bytes 01)"),
        (
            np.array([0x7FC00001], np.uint32).view(np.float32),
            np.array([0x7FC00000], np.uint32).view(np.float32),
            "nan (bytes 01 00 c0 7f) instead of nan (bytes 00 00 c0 7f)",
        ),
    ],
    ids=["values", "bytes of bool", "NaNs"],
)
def test_what_differs_is_shown_differently(actual: Array, expected: Array, text: str) -> None:
    """By the bytes, if the values print alike."""
    assert difference(actual, expected).endswith(f": {text}")
    assert difference(expected, expected) == ""
