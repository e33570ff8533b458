"""How far two clocks are apart: the best of some questions and answers. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SAMPLES", "Reading", "boot_id", "compare"]

SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """What the other side says: its clock, and on which boot of which machine that counts."""

    now_ns: int
    boot: str


def boot_id() -> str:
    """Equal where two processes read the same monotonic clock; "" where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def compare(ask: Callable[[], Reading], now_ns: Callable[[], int], own_boot: str) -> tuple[int, int]:
    """(offset, error) in ns: the other clock is ours plus ``offset``, give or take ``error``.

    Of ``SAMPLES`` answers the one with the shortest way counts, which bounds the error by half of it
    (Cristian, 1989). On one boot of one machine both read the same clock; unless an answer shows
    otherwise (namespaces may shift it), nothing is to be added.
    """
    best: tuple[int, int] | None = None
    same = bool(own_boot)
    for _ in range(SAMPLES):
        asked_ns = now_ns()
        reading = ask()
        heard_ns = now_ns()
        round_ns = heard_ns - asked_ns
        same = same and reading.boot == own_boot and asked_ns <= reading.now_ns <= heard_ns
        offset_ns = reading.now_ns - (asked_ns + heard_ns) // 2
        if best is None or round_ns < 2 * best[1]:
            best = (offset_ns, (round_ns + 1) // 2)
    assert best is not None
    return (0, best[1]) if same else best
