"""The table of a stall: aligned, and short also for many tensors and many ranks."""

from __future__ import annotations

import pytest

from ddlcore.coordinator.stall_table import SHOWN, Late, on_ranks, spans, stall_table


def test_columns_are_aligned_and_each_tensor_has_its_row() -> None:
    """Those of one kind stand together; a process set is named."""
    late = [
        Late("grad", 0, (0, 1, 2), (3,), 61.25),
        Late("", 4, (0, 3), (2,), 60.0),
        Late("a.longer.name", 0, (0, 1, 2), (3,), 100.0),
    ]
    assert stall_table(late).splitlines() == [
        "  tensor                                   ready on  missing ranks  waits s",
        "  grad                                     0-2       3                 61.2",
        "  a.longer.name                            0-2       3                100.0",
        "  (a call without a name) (process set 4)  0,3       2                 60.0",
    ]


def test_many_tensors_that_wait_for_the_same_ranks_are_cut() -> None:
    """What is left out is counted, with the longest wait; one more than fits is shown instead."""
    late = [Late(f"t{i}", 0, (0,), (1,), 60.0 + i) for i in range(200)]
    lines = stall_table(late).splitlines()
    assert len(lines) == 1 + SHOWN + 1
    assert lines[-1].split() == ["…", "192", "more", "0", "1", "259.0"]
    assert len(stall_table(late[: SHOWN + 1]).splitlines()) == 1 + SHOWN + 1
    assert "more" not in stall_table(late[: SHOWN + 1])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "none"),
        ((5,), "5"),
        ((9, 0, 1, 2, 3, 4, 5, 6), "0-6,9"),
        (range(1024), "0-1023"),
        (range(0, 1024, 2), "0,2,4,6,8,10,12,14,16,18,20,22,… (512 ranks)"),
    ],
)
def test_ranks_are_told_as_ranges(ranks: range, text: str) -> None:
    """A list of very many pieces is cut, and counted."""
    assert spans(ranks) == text


def test_one_rank_and_many() -> None:
    """In a sentence."""
    assert [on_ranks((3,)), on_ranks((0, 1, 2, 5))] == ["rank 3", "ranks 0-2,5"]
