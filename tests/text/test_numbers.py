"""Numbers are written with few digits and their unit."""

from __future__ import annotations

from ddlcore.text.html import element, page, table
from ddlcore.text.numbers import (
    UNKNOWN,
    duration,
    exact_size,
    letter_size,
    memory_size,
    percent,
    short_size,
    three_digits,
)
from ddlcore.text.ranks import ranks_text, span

MIB = 1 << 20


def test_sizes() -> None:
    """Short, exact, for a command line, and of memory."""
    assert [short_size(n) for n in (12, 1536, 1.5 * MIB, 3 << 30)] == ["12 B", "1.5 KiB", "1.5 MiB", "3.0 GiB"]
    assert [exact_size(n) for n in (12, 1025, 64 << 10, MIB, 1 << 30)] == ["12 B", "1025 B", "64 KiB", "1 MiB", "1 GiB"]
    assert [letter_size(n) for n in (12, 64 << 10, MIB * 3 // 2, 2 << 30)] == ["12", "64K", "1.5M", "2G"]
    assert [memory_size(n) for n in (300 * MIB, 3 << 29)] == ["300 MiB", "1.5 GiB"]


def test_times_and_shares() -> None:
    """With three digits, and in whole percent."""
    assert [duration(s) for s in (2.5, 0.31, 12.4e-6)] == ["2.5 s", "310 ms", "12.4 µs"]
    assert [percent(share) for share in (0.25, None)] == ["25%", UNKNOWN]
    assert [three_digits(x) for x in (123.4, 12.34, 1.234, 0.01234)] == ["123", "12.3", "1.23", "0.01"]
    assert three_digits(0.01234, most_decimals=4) == "0.0123"


def test_ranks() -> None:
    """In ranges."""
    assert span([0, 1, 2, 5]) == "0-2,5" and span([]) == ""
    assert [ranks_text(ranks) for ranks in ([3], [0, 1, 2, 5])] == ["rank 3", "ranks 0-2, 5"]


def test_pages_escape_what_they_show() -> None:
    """Texts and titles, but not the parts, which are HTML."""
    assert element("p", "a < b") == "<p>a &lt; b</p>"
    shown = page("<x>", [table(("&",), [("<td>",)])])
    assert "<title>&lt;x&gt;</title>" in shown
    assert '<table><tr><th scope="col">&amp;</th></tr><tr><td>&lt;td&gt;</td></tr></table>' in shown
