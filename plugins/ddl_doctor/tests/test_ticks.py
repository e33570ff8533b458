"""Round numbers for axes."""

from __future__ import annotations

import itertools

import pytest
from ddl_doctor.ticks import linear_ticks, log_ticks, spread
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (10.0, [0, 2, 4, 6, 8, 10]),
        (49.4, [0, 10, 20, 30, 40]),
        (100, [0, 20, 40, 60, 80, 100]),
        (0.3, [0, 0.1, 0.2, 0.3]),
        (0, [0]),
        (float("nan"), [0]),
    ],
)
def test_linear(high: float, ticks: list[float]) -> None:
    """They begin with 0 and stay within the axis."""
    assert linear_ticks(high) == pytest.approx(ticks)


@given(st.floats(1e-6, 1e9), st.integers(3, 12))
def test_linear_of_any_length(high: float, most: int) -> None:
    """Never more than asked for, never 0 alone, and equally far apart."""
    ticks = linear_ticks(high, most)
    assert 2 <= len(ticks) <= most and ticks[-1] <= high * (1 + 1e-6)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


@given(st.floats(1e-6, 1e6), st.floats(4.0, 1e9))
def test_logarithmic(low: float, ratio: float) -> None:
    """Three or more, in order, within the axis."""
    ticks = log_ticks(low, low * ratio)
    assert len(ticks) >= 3 and ticks == sorted(set(ticks))
    assert low <= ticks[0] and ticks[-1] <= low * ratio


def test_powers_of_ten_come_first() -> None:
    """More numbers than these are taken only where they are too few."""
    assert log_ticks(1.0, 1e4) == [1, 10, 100, 1000, 10000]
    assert log_ticks(2.0, 60.0) == [3, 10, 30]


@pytest.mark.parametrize(
    ("values", "gaps", "shown"),
    [
        (
            [4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24],
            6,
            [4, 1 << 10, 1 << 14, 1 << 18, 1 << 24],
        ),
        ([4], 5, [4]),
        ([4, 8], 5, [4, 8]),
        ([], 5, []),
        ([1, 2, 3, 4], 9, [1, 2, 3, 4]),
    ],
)
def test_labels_do_not_touch(values: list[int], gaps: int, shown: list[int]) -> None:
    assert spread(values, gaps) == shown
