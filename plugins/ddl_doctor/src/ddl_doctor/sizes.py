"""Write sizes and measured numbers as text, with few digits."""

from __future__ import annotations

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def short_size(nbytes: float) -> str:
    """Return ``nbytes`` as text with one decimal, in the largest unit that makes the number at least 1: 1.5 MiB.

    Below 1 KiB, the unit is B and there is no decimal: 12 B.
    """
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def exact_size(nbytes: int) -> str:
    """Return ``nbytes`` as text, in the largest unit that gives a whole number: 64 KiB, 1025 B."""
    for unit, factor in _UNITS:
        if nbytes % factor == 0 and nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def three_digits(value: float, most_decimals: int = 2) -> str:
    """Return ``value`` as text with about three digits: 123, 12.3, 1.23.

    A value of 0.1 or more gets at most two decimals. A value below 0.1 gets ``most_decimals`` decimals.
    """
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else most_decimals
    return f"{value:.{decimals}f}"
