"""Measure how far two clocks are apart: ask for the time of the other clock several times, and use the best answer.

``compare`` reads only the clocks that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """A time that another process's clock has shown, and the boot of the machine to which that clock belongs."""

    now_ns: int
    boot: str


def boot_id() -> str:
    """Return an id that is equal in two processes if they read the same monotonic clock. Empty if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def compare(ask: Callable[[], Reading], now_ns: Callable[[], int], own_boot: str) -> tuple[int, int]:
    """Return (offset, error) in ns: the other clock shows ours plus ``offset``, with an error of at most ``error``.

    ``ask`` returns a reading of the other clock, ``now_ns`` the time of our clock, whose boot is ``own_boot``. Of
    ``SAMPLES`` answers, the one with the shortest round trip is used, which limits the error to half of that time
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
