"""Sizes and measured numbers are written with few digits."""

from __future__ import annotations

from ddl_doctor.sizes import exact_size, short_size, three_digits

MIB = 1 << 20


def test_sizes() -> None:
    """A size is written in few digits, or exactly."""
    assert [short_size(n) for n in (12, 1536, 1.5 * MIB, 3 << 30)] == ["12 B", "1.5 KiB", "1.5 MiB", "3.0 GiB"]
    assert [exact_size(n) for n in (12, 1025, 64 << 10, MIB, 1 << 30)] == ["12 B", "1025 B", "64 KiB", "1 MiB", "1 GiB"]


def test_numbers() -> None:
    """A measured number is written with about three digits."""
    assert [three_digits(x) for x in (123.4, 12.34, 1.234, 0.01234)] == ["123", "12.3", "1.23", "0.01"]
    assert three_digits(0.01234, most_decimals=4) == "0.0123"
