"""Build the objects that observe a rank while it trains, for which the settings ask: metrics, pulses, samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ddlcore.builtin.nvml import use_of
from ddlcore.config import Settings
from ddlcore.messages import Profile, Pulse
from ddlcore.observe.metrics import Exporter, Family, families
from ddlcore.observe.pulse import Pace, Ticker, make_pulse
from ddlcore.observe.sampler import Sampler
from ddlcore.plug.registry import Registry
from ddlcore.runtime.meter import Stats
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Placement


class Observer(Protocol):
    """An object that observes a rank in threads of its own, until it is closed."""

    def close(self) -> None:
        """Stop observing. A second call has no effect."""


class Subject(Protocol):
    """The rank that is observed. A Job that has been started implements it."""

    rank: int
    size: int
    launched: Placement
    settings: Settings
    registry: Registry
    tensor_queue: TensorQueue

    def stats(self) -> Stats: ...

    def tell(self, message: Pulse | Profile) -> None: ...


def observers(job: Subject) -> list[Observer]:
    """Return all observers for which the settings ask; they run already.

    Raises ValueError with a message of one line if one of them cannot be started; then all others are closed.
    """
    made: list[Observer] = []
    try:
        for build in _wanted(job):
            made.append(build())
    except BaseException:
        for one in made:
            one.close()
        raise
    return made


def _wanted(job: Subject) -> Iterator[Callable[[], Observer]]:
    if job.settings.whole("metrics_port") and job.launched.local_rank == 0:
        yield lambda: _exporter(job)
    if job.settings.number("pulse_s") > 0:
        yield lambda: _ticker(job)
    if job.settings.number("sample_ms") > 0:
        yield lambda: _sampler(job)


def _exporter(job: Subject) -> Observer:
    pace, lock = Pace(), threading.Lock()

    def read() -> list[Family]:
        with lock:  # two clients may scrape at the same time
            stats = job.stats()
            return families(stats, pace.step_s(stats["steps"]))

    exporter = Exporter(read, {"rank": str(job.rank), "size": str(job.size)})
    exporter.open(job.settings.text("metrics_address"), job.settings.whole("metrics_port"))
    return exporter


def _ticker(job: Subject) -> Observer:
    gpu = use_of(os.environ, job.launched.local_rank)

    def tick() -> None:
        stats = job.stats()
        job.tell(make_pulse(stats["steps"], stats["seconds"]["user"], gpu()))

    return Ticker(job.settings.number("pulse_s"), tick, f"ddl-pulse-{job.rank}")


def _sampler(job: Subject) -> Observer:
    loaders = [module for provider in job.registry.adapters.values() for module in provider.loaders]
    main = threading.main_thread().ident
    assert main is not None
    interval_s = job.settings.number("sample_ms") / 1000
    return Sampler(main, interval_s, job.tensor_queue.steps, loaders, job.tell, f"ddl-sampler-{job.rank}")
