"""Medians, ratios and their intervals."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow, Ratio, interval_words, median_interval, ratio

ROW = MeasuredRow(
    "allreduce", 4096, {TRANSPORT: [1e-6, 2e-6, 4e-6], WHOLE: [2e-5, 3e-5, 4e-5], "pigeon": [3e-6, 8e-6, 8e-6]}
)


def test_a_row_survives_json() -> None:
    """As it crosses from rank 0 to the launcher."""
    assert MeasuredRow.from_json(json.loads(json.dumps(ROW.as_json()))) == ROW


def test_rate_counts_the_tensors_bytes() -> None:
    """GB/s are 10⁹ bytes."""
    assert ROW.median_s(TRANSPORT) == 2e-6
    assert ROW.gbytes_per_s(TRANSPORT) == pytest.approx(2.048)


def test_ratio_is_taken_round_by_round() -> None:
    """The median of 3, 4 and 2, not the ratio of the medians (4)."""
    found = ratio(ROW, "pigeon", TRANSPORT)
    assert (found.middle, found.low, found.high) == pytest.approx((3.0, 2.0, 4.0))


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (25, 7)])
def test_interval_by_order_statistics(count: int, left_out: int) -> None:
    """How many values are left out at each end, as in the tables of the sign test."""
    values = [float(v) for v in range(count)]
    assert median_interval(values[::-1]) == (values[left_out], values[-1 - left_out])


@pytest.mark.parametrize("count", [6, 9, 11])
def test_interval_covers_the_median(count: int) -> None:
    """By enumeration: each value lies above or below the true median with equal chance."""
    covered = 0
    for signs in itertools.product((-1.0, 1.0), repeat=count):
        low, high = median_interval([sign * (1 + at) for at, sign in enumerate(signs)])
        covered += low <= 0 <= high
    assert covered / 2**count >= 0.95


def test_interval_holds_the_sample_median() -> None:
    """Whatever the order."""
    values = [5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 8.0, 4.0, 6.0]
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high
    assert (low, high) == (2.0, 8.0)


def test_a_ratio_is_shown_with_three_digits() -> None:
    """Neither 0.5 nor 1234 is shown with more than is known."""
    assert str(Ratio(0.5, 0.456, 12.34)) == "0.50 [0.46, 12.3]"
    assert str(Ratio(123.4, 99.99, 1234.5)) == "123 [100.0, 1234]"


def test_few_rounds_have_no_interval() -> None:
    """Five values cannot hold a median with 95 %; six can."""
    assert [interval_words(rounds) for rounds in (2, 5)] == ["least and greatest"] * 2
    assert [interval_words(rounds) for rounds in (6, 15)] == ["95 % interval of the median"] * 2
