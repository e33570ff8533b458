"""Measure the difference of two clocks: ask for the time of the other clock several times, and use the best answer.

This module reads only the clocks that are passed to it.
"""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.observe.clock import Reading

SAMPLES = 8


def compare(ask: Callable[[], Reading], now_ns: Callable[[], int], own_boot: str) -> tuple[int, int]:
    """Return (offset, error) in ns: the other clock is ahead of this process's clock by ``offset`` ± ``error``.

    ``ask`` asks the other process and returns a reading of its clock. ``now_ns`` returns the time of this process's
    clock, and ``own_boot`` is this machine's boot id. Of ``SAMPLES`` readings, the one with the shortest round trip is
    used; its error is at most half of the round trip (Cristian, 1989). If the boot ids are equal, both processes read
    the same clock, and the offset is 0. But if a reading contradicts this, the measured offset is returned, because a
    time namespace may shift a clock.
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
