"""Pages: what is escaped, and what a narrow or a dark window needs."""

from __future__ import annotations

import pytest

from ddlcore.text.html import page, table, unbroken


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("within 146.7 µs of", "within 146.7~µs of"),
        ("took 0.1 s, 4.0 KiB of 64 B", "took 0.1~s, 4.0~KiB of 64~B"),
        ("9.4 Gbit/s, 2 GB/s, +1.2 %", "9.4~Gbit/s, 2~GB/s, +1.2~%"),
        ("8 buckets and 3 sums, 2 Bytes", "8 buckets and 3 sums, 2 Bytes"),
    ],
)
def test_a_number_keeps_its_unit(text: str, shown: str) -> None:
    """Only numbers and units are joined."""
    assert unbroken(text) == shown.replace("~", "\N{NO-BREAK SPACE}")


def test_a_page() -> None:
    """Its title and its cells are text; it says how wide it is, and what it looks like in the dark."""
    text = page("<a>", [table(["<b>"], [["<c>"]])], ".own { color: red; }")
    assert "<title>&lt;a&gt;</title>" in text and "&lt;b&gt;" in text and "&lt;c&gt;" in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and ".own { color: red; }" in text
