"""Measure the load and progress of this rank. The rank sends them at intervals, in messages that are called pulses."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddlcore.messages.observing import Activity, Pulse
from ddlcore.threads import OwnThread

_STATM = Path("/proc/self/statm")


class Ticker:
    """A thread that calls ``tick`` every ``interval_s`` seconds until ``close``.

    If ``tick`` raises an exception, the calls end, but the job continues. If ``spread`` is not 0, the intervals are
    random: they differ from ``interval_s`` by up to ``spread * interval_s``. With equal intervals, all calls could come
    at the same phase of a step that repeats.
    """

    def __init__(self, interval_s: float, tick: Callable[[], None], name: str, spread: float = 0.0) -> None:
        self._interval_s = interval_s
        self._spread = spread
        self._tick = tick
        self._end = threading.Event()
        self._thread = OwnThread(target=self._run, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stop the calls. If a call is in progress, wait up to 2 s for its end.

        Any thread except this ticker's own thread may call this method, also more than once.
        """
        self._end.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._end.wait(self._interval_s * (1 + random.uniform(-self._spread, self._spread))):
            self._tick()


def make_pulse(
    steps: int, user_s: float, gpu: tuple[float, int, int] | None, activity: Activity | None = None
) -> Pulse:
    """Return a Pulse that contains the measured load of this process and the values of the arguments.

    ``steps`` is the number of steps so far, and ``user_s`` is the time in seconds that the user's threads have spent in
    ``wait``. ``gpu`` is (utilization 0 … 1, used bytes, total bytes), or None without a GPU.
    """
    share, used, total = gpu if gpu is not None else (-1.0, 0, 0)
    return Pulse(
        at_s=time.monotonic(),
        steps=steps,
        user_s=user_s,
        cpu_s=time.process_time(),
        resident_bytes=resident_bytes(),
        gpu_share=share,
        gpu_used_bytes=used,
        gpu_total_bytes=total,
        activity=activity,
    )


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not provide the number."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Pace:
    """A meter that computes the duration of a step from the number of steps at successive calls.

    Only one thread at a time may call its method.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._at_s = time.monotonic()
        self._step_s = 0.0

    def step_s(self, steps: int) -> float:
        """Return the mean duration in seconds of the latest steps, or 0 before the first step.

        ``steps`` is the number of steps so far. The latest steps are those since the previous call with a new number.
        """
        now_s = time.monotonic()
        if steps > self._steps:
            self._step_s = (now_s - self._at_s) / (steps - self._steps)
        if steps != self._steps or not self._step_s:
            self._steps, self._at_s = steps, now_s
        return self._step_s
