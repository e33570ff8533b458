"""Send the load and progress of a rank to the launcher at intervals, in messages that are called pulses."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddl_doctor.gpu_driver import use_of
from ddl_doctor.input_clock import InputClock, loaders, main_thread
from ddl_doctor.pulses.activity import ActivityMeter
from ddl_doctor.pulses.traffic import TrafficMeter
from ddl_doctor.reports import Activity, Pulse, to_send
from ddlcore.process.observers import ObservedRank, RankObserver
from ddlcore.runtime.meter import Stats
from ddlcore.threads import OwnThread

_STATM = Path("/proc/self/statm")
_INPUT_S = 0.05  # mean interval of the samples that tell whether the main thread waits for input
_INPUT_SPREAD = 0.5


class Pulses(RankObserver):
    """Sends pulses of a rank, with its present activity if the setting ``activity`` asks for it."""

    def __init__(self, rank: ObservedRank) -> None:
        self._tickers: list[Ticker] = []
        activity: Callable[[Stats], Activity | None] = _no_activity
        if rank.settings["activity"]:
            clock = InputClock(main_thread(), loaders(rank.registry))
            self._tickers.append(Ticker(_INPUT_S, clock.sample, f"ddl-input-{rank.rank}", _INPUT_SPREAD))
            activity = _activity(rank, clock)
        gpu = use_of(os.environ, rank.launched.local_rank)

        def tick() -> None:
            stats = rank.stats_of_world()
            rank.tell(to_send(make_pulse(stats["steps"], stats["seconds"]["user"], gpu(), activity(stats))))

        self._tickers.append(Ticker(rank.settings.number("pulse_s"), tick, f"ddl-pulse-{rank.rank}"))

    def close(self) -> None:
        for ticker in reversed(self._tickers):
            ticker.close()


def _no_activity(stats: Stats) -> None:
    """Return None, for pulses that do not tell what the rank waits for."""


def _activity(rank: ObservedRank, clock: InputClock) -> Callable[[Stats], Activity]:
    meter = ActivityMeter(rank.launched_members)
    counts = bool(rank.address) and rank.launched.local_rank == 0  # there are other hosts; one rank counts for all
    traffic = TrafficMeter(rank.address) if counts else None

    def read(stats: Stats) -> Activity:
        sent = traffic.read() if traffic is not None else ()
        return meter.read(stats, rank.doing(), rank.lookout.pending_in_sets(), clock.input_s, clock.sampled_s, sent)

    return read


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
