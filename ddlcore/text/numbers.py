"""Write sizes, times and shares as text, with few digits and with a unit."""

from __future__ import annotations

UNKNOWN = "–"  # shown in tables in place of a value that is not known
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def letter_size(nbytes: int) -> str:
    """Return ``nbytes`` as text with a unit of one letter, as in command lines: 64K, 1.5M, 2G. Below 1 KiB: no unit."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.3g}{unit[0]}"
    return str(nbytes)


def memory_size(nbytes: float) -> str:
    """Return ``nbytes``, an amount of memory, as text in GiB or MiB: 1.5 GiB, 300 MiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time as text with at most three significant digits, in s, ms or µs: 2.5 s, 310 ms, 12.4 µs."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def percent(share: float | None) -> str:
    """Return ``share`` as text in whole percent: "25%" for 0.25. None means an unknown share and gives a dash."""
    return UNKNOWN if share is None else f"{share:.0%}"
