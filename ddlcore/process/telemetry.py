"""Build the objects that observe a rank while it trains: metrics, pulses and samples of the stack.

The settings decide which of these objects are built.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from ddlcore.builtin.nvml import use_of
from ddlcore.config.loading import Settings
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.observing import Activity, Profile, Pulse
from ddlcore.observe.activity import ActivityMeter
from ddlcore.observe.metrics import Exporter, Family, PatientExporter, families
from ddlcore.observe.pulse import Pace, Ticker, make_pulse
from ddlcore.observe.sampler import InputClock, Sampler
from ddlcore.observe.traffic import TrafficMeter
from ddlcore.plug.registry import Registry
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Stats
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Placement

_INPUT_S = 0.05  # mean interval of the samples that tell whether the main thread waits for input
_INPUT_SPREAD = 0.5


class Observer(Protocol):
    """An object that observes a rank in its own threads, until ``close`` is called."""

    def close(self) -> None:
        """Stop observing. A second call has no effect."""


class Subject(Protocol):
    """The rank that is observed. A started Job implements this protocol."""

    rank: int
    size: int
    launched: Placement
    settings: Settings
    registry: Registry
    tensor_queue: TensorQueue
    lookout: Lookout
    address: str

    def doing(self) -> str: ...

    def launched_members(self, set_id: int) -> tuple[int, ...]: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def report(self) -> WorldReport | None: ...

    def stats(self) -> Stats: ...

    def stats_of_world(self) -> Stats: ...

    def tell(self, message: Pulse | Profile) -> None: ...


def observers(job: Subject) -> list[Observer]:
    """Start and return all observers that the settings of ``job`` ask for.

    Raises ValueError with a message of one line if an observer cannot be started. In this case the observers that were
    started before are closed.
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
    if job.settings.whole("metrics_port"):
        if job.report is not None and job.local_rank == 0:  # the first rank of the host may be lost or not here yet
            yield lambda: PatientExporter(_exporter(job, {"rank": str(job.launched.rank)}), *_place(job))
        elif job.report is None and job.launched.local_rank == 0:
            yield lambda: _opened(_exporter(job, {"rank": str(job.rank), "size": str(job.size)}), *_place(job))
    pulse_s = job.settings.number("pulse_s")
    if pulse_s > 0 and job.settings["activity"]:
        clock = InputClock(_main_thread(), _loaders(job))
        yield lambda: Ticker(_INPUT_S, clock.sample, f"ddl-input-{job.rank}", _INPUT_SPREAD)
        yield lambda: _ticker(job, pulse_s, _activity(job, clock))
    elif pulse_s > 0:
        yield lambda: _ticker(job, pulse_s, lambda stats: None)
    if job.settings.number("sample_ms") > 0:
        yield lambda: _sampler(job)


def _exporter(job: Subject, labels: Mapping[str, str]) -> Exporter:
    """Return what serves the metrics of ``job``, each with ``labels``; it is not open yet.

    In an elastic job they must not tell the size or the number within the world: these change from world to world, and
    a series of Prometheus whose labels change ends.
    """
    pace, lock = Pace(), threading.Lock()

    def read() -> list[Family]:
        with lock:  # two clients may scrape at the same time
            return families(job.stats(), pace.step_s(job.stats_of_world()["steps"]))

    return Exporter(read, labels)


def _place(job: Subject) -> tuple[str, int]:
    return job.settings.text("metrics_address"), job.settings.whole("metrics_port")


def _opened(exporter: Exporter, address: str, port: int) -> Exporter:
    exporter.open(address, port)
    return exporter


def _ticker(job: Subject, interval_s: float, activity: Callable[[Stats], Activity | None]) -> Observer:
    gpu = use_of(os.environ, job.launched.local_rank)

    def tick() -> None:
        stats = job.stats_of_world()
        job.tell(make_pulse(stats["steps"], stats["seconds"]["user"], gpu(), activity(stats)))

    return Ticker(interval_s, tick, f"ddl-pulse-{job.rank}")


def _activity(job: Subject, clock: InputClock) -> Callable[[Stats], Activity]:
    meter = ActivityMeter(job.launched_members)
    counts = bool(job.address) and job.launched.local_rank == 0  # there are other hosts, and one rank counts for all
    traffic = TrafficMeter(job.address) if counts else None

    def read(stats: Stats) -> Activity:
        sent = traffic.read() if traffic is not None else ()
        return meter.read(stats, job.doing(), job.lookout.pending_in_sets(), clock.input_s, clock.sampled_s, sent)

    return read


def _sampler(job: Subject) -> Observer:
    interval_s = job.settings.number("sample_ms") / 1000
    return Sampler(
        _main_thread(), interval_s, job.tensor_queue.steps, _loaders(job), job.tell, f"ddl-sampler-{job.rank}"
    )


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def _loaders(job: Subject) -> list[str]:
    return [module for provider in job.registry.adapters.values() for module in provider.loaders]
