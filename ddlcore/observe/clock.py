"""Measure how far two clocks are apart, from the best of several questions and answers. Reads only the given clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """A reading of the other side's clock, and the boot of the machine to which that clock belongs."""

    now_ns: int
    boot: str


def boot_id() -> str:
    """Return an id that is equal for two processes if they read the same monotonic clock; "" if that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def compare(ask: Callable[[], Reading], now_ns: Callable[[], int], own_boot: str) -> tuple[int, int]:
    """Return (offset, error) in ns: the other clock is ours plus ``offset``, give or take ``error``.

    Of ``SAMPLES`` answers, the one with the shortest round trip is used, which limits the error to half of that time
    (Cristian, 1989). Processes of one boot of one machine read the same clock, so the offset is 0, unless an answer
    contradicts that (a time namespace may shift a clock).
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
