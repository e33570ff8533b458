"""Columns are as wide as their widest cell, and lines end with their last visible character."""

from __future__ import annotations

from ddlcore.text.columns import aligned, indented, padded, table


def test_columns_are_aligned() -> None:
    """To the left, or to the right where that is asked for, with two spaces between them."""
    rows = [("rank", "host"), ("10", "a"), ("9", "bcdef")]
    assert aligned(rows) == ["rank  host", "10    a", "9     bcdef"]
    assert aligned(rows, right=[0]) == ["rank  host", "  10  a", "   9  bcdef"]


def test_columns_have_a_least_width() -> None:
    """Only the columns that it is given for, and only if their cells are smaller."""
    assert padded([("a", "b", "c")], right=[1], least=(3, 2)) == [("a  ", " b", "c")]
    assert padded([("abcd",)], least=(3, 9)) == [("abcd",)]


def test_nothing_is_laid_out_as_nothing() -> None:
    """No rows, and rows without cells."""
    assert aligned([]) == [] and table([]) == [] and padded([], least=(1, 2)) == []
    assert aligned([(), ()]) == ["", ""]


def test_a_table_leaves_empty_columns_out() -> None:
    """Those in which no row has anything."""
    rows = [{"name": "shm", "missing": "", "state": "ready"}, {"name": "x", "missing": "", "state": ""}]
    assert indented(table(rows)) == ["  name  state", "  shm   ready", "  x"]
