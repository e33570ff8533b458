"""The threshold policy: order of arrival, one open bucket for each key, groups together, giants alone."""

from __future__ import annotations

import pytest

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.contracts.fusion import Ready


def arrange(*tensors: tuple[str, int] | tuple[str, int, str], limit: float = 100) -> list[list[int]]:
    """Of (key, bytes) or (key, bytes, group)."""
    ready = [Ready(f"t{i}", t[0], t[1], group=t[2] if len(t) > 2 else None) for i, t in enumerate(tensors)]
    return ThresholdFusion().arrange(ready, {"fusion_bytes": limit})


def test_buckets_fill_up_to_the_threshold() -> None:
    """The threshold itself still fits; one byte more opens the next bucket."""
    assert arrange(("a", 60), ("a", 40), ("a", 1), ("a", 99), ("a", 1)) == [[0, 1], [2, 3], [4]]


def test_other_keys_in_between_do_not_part_a_bucket() -> None:
    """Each key has its own open bucket; buckets run in the order of their first members."""
    assert arrange(("a", 30), ("b", 30), ("a", 30), ("b", 30), ("a", 30)) == [[0, 2, 4], [1, 3]]
    assert arrange(("b", 90), ("a", 30), ("b", 30), ("a", 30)) == [[0], [1, 3], [2]]


def test_a_giant_goes_alone() -> None:
    """It neither joins a bucket nor closes the one that is open."""
    assert arrange(("a", 30), ("a", 101), ("a", 30)) == [[0, 2], [1]]
    assert arrange(("a", 101), ("a", 30)) == [[0], [1]]


def test_zero_fuses_nothing() -> None:
    """Not even tensors without a byte, nor a group."""
    assert arrange(("a", 0), ("a", 0), ("a", 1), limit=0) == [[0], [1], [2]]
    assert arrange(("a", 0, "g"), ("a", 0, "g"), limit=0) == [[0], [1]]


def test_empty_tensors_fit_anywhere() -> None:
    """They cost a bucket nothing."""
    assert arrange(("a", 100), ("a", 0), ("a", 0)) == [[0, 1, 2]]


def test_nothing_gives_nothing() -> None:
    """No tensor, no bucket."""
    assert arrange() == []


def test_a_group_stays_together() -> None:
    """Its tensors come as one where the first of them came, in the open bucket if all fit, else in a new one."""
    assert arrange(("a", 10), ("a", 30, "g"), ("a", 20), ("a", 30, "g")) == [[0, 1, 3, 2]]
    assert arrange(("a", 50), ("a", 30, "g"), ("a", 30, "g"), ("a", 30)) == [[0], [1, 2, 3]]


def test_a_group_that_does_not_fit_is_placed_tensor_by_tensor() -> None:
    """As if it were none."""
    assert arrange(("a", 60, "g"), ("a", 60, "g"), ("a", 40, "g")) == [[0], [1, 2]]


def test_a_group_of_several_keys_is_one_unit_for_each() -> None:
    """One collective has one key; equal names of groups do not join different keys."""
    assert arrange(("a", 30, "g"), ("b", 30, "g"), ("a", 30, "g"), ("b", 30, "g")) == [[0, 2], [1, 3]]


@pytest.mark.timeout(240)
def test_many_tensors_are_arranged_quickly() -> None:
    """Linear in their number, also within one group."""
    tensors = [("a", 1, "g")] * 50_000
    assert arrange(*tensors, limit=1 << 20) == [list(range(50_000))]
    assert len(arrange(*tensors, limit=100)) == 500


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([40, 40, 40, 40, 40, 40], [[0], [1, 2, 3, 4], [5]]),  # small at both ends
        ([10, 20, 30, 10, 20, 30], [[0, 1], [2, 3], [4, 5]]),
        ([10, 20], [[0, 1]]),  # a step that fits the edge is one bucket
        ([100, 100], [[0], [1]]),
        ([300, 10, 10], [[0], [1, 2]]),  # what is larger than any goes alone, and is not the last
        ([10, 300], [[0], [1]]),
    ],
)
def test_first_and_last_are_small(sizes: list[int], buckets: list[list[int]]) -> None:
    ready = [Ready(f"t{i}", "k", nbytes) for i, nbytes in enumerate(sizes)]
    assert ThresholdFusion().arrange(ready, {"fusion_bytes": 200, "first_bucket_bytes": 50}) == buckets
