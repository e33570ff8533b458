"""Numbers are written with few digits and their unit."""

from __future__ import annotations

from ddlcore.text.html import element, page, table
from ddlcore.text.numbers import UNKNOWN, duration, letter_size, memory_size, percent
from ddlcore.text.ranks import ranks_text, span

MIB = 1 << 20


def test_sizes() -> None:
    """For a command line, and of memory."""
    assert [letter_size(n) for n in (12, 64 << 10, MIB * 3 // 2, 2 << 30)] == ["12", "64K", "1.5M", "2G"]
    assert [memory_size(n) for n in (300 * MIB, 3 << 29)] == ["300 MiB", "1.5 GiB"]


def test_times_and_shares() -> None:
    """With three digits, and in whole percent."""
    assert [duration(s) for s in (2.5, 0.31, 12.4e-6)] == ["2.5 s", "310 ms", "12.4 µs"]
    assert [percent(share) for share in (0.25, None)] == ["25%", UNKNOWN]


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
