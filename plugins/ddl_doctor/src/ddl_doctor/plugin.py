"""Describe what ddl_doctor adds, as plain data: commands, the checks of `ddl doctor`, and what observes ranks."""

from __future__ import annotations

from ddlcore.hooks import (
    CheckProvider,
    CommandProvider,
    ObserverProvider,
    RecorderProvider,
    Setting,
    WatchProvider,
    hookimpl,
)


@hookimpl
def ddl_cli() -> list[CommandProvider]:
    """Return the providers of the commands."""
    return [
        CommandProvider("doctor", "ddl_doctor.doctor.command:doctor", doc="examines hosts, and the links between them"),
        CommandProvider(
            "bench", "ddl_doctor.bench.command:bench", doc="times collectives, and those of other libraries"
        ),
        CommandProvider("timeline", "ddl_doctor.timeline.command:timeline", doc="reads what a job has recorded"),
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the providers of those checks of `ddl doctor` that run whichever plugins are installed."""
    known = (
        ("versions", "versions:VersionsCheck", "ddl, Python and frameworks are the same on all hosts"),
        ("tested", "versions:TestedVersions", "plugins work with the installed releases of their libraries"),
        ("known-bad", "versions:KnownBadVersions", "nothing installed is known to be bad"),
        ("dev-shm", "system:SharedMemoryCheck", "/dev/shm is large enough for workers of data loaders"),
        ("limits", "system:LimitsCheck", "enough files may be opened, enough memory locked"),
        ("network-cards", "network:NetworkCardsCheck", "which network cards there are"),
        ("iommu", "gpus:IommuCheck", "no IOMMU stands between GPUs"),
        ("gpu-sharing", "gpus:GpuSharingCheck", "every rank takes a GPU of its own"),
        ("gpu-links", "gpus:GpuLinksCheck", "the GPUs of a host reach each other's memory"),
    )
    return [CheckProvider(name, f"ddl_doctor.checks.{target}", doc=doc) for name, target, doc in known]


@hookimpl
def ddl_observers() -> list[ObserverProvider]:
    """Return the providers of three observers.

    The first sends the pulses by which watches learn how the ranks are. The second takes the samples by which
    `ddl doctor -- COMMAND` sees how long a step waits for input. The third starts the timeline of a rank.
    """
    pulse_s = Setting(
        "pulse_s",
        float,
        0.0,
        "how often each rank reports its load and progress to the launcher, in seconds; 0: never. `ddl run --top` "
        "sets it",
        minimum=0,
        group="output",
    )
    activity = Setting(
        "activity",
        bool,
        False,
        "1: each of these reports also tells what the rank waits for. The launcher sets it for a watch that shows this",
        group="output",
    )
    sample_ms = Setting(
        "sample_ms",
        float,
        0.0,
        "how often to sample the stack of a rank's main thread, in ms; 0: never. `ddl doctor -- COMMAND` sets it",
        minimum=0,
        group="output",
    )
    return [
        ObserverProvider(
            "pulses",
            "ddl_doctor.pulses.pulses:Pulses",
            settings=(pulse_s, activity),
            setting="pulse_s",
            doc="tells the launcher a rank's load and progress",
        ),
        ObserverProvider(
            "samples",
            "ddl_doctor.doctor.samples:Samples",
            settings=(sample_ms,),
            setting="sample_ms",
            doc="tells the launcher on which lines of the script the time of a step is spent",
        ),
        ObserverProvider(
            "timeline",
            "ddl_doctor.recording.starting:Starting",
            settings=_timeline(),
            setting="timeline",
            doc="starts the timeline of a rank",
        ),
    ]


@hookimpl
def ddl_watches() -> list[WatchProvider]:
    """Return the provider of the watch that merges what the ranks have recorded."""
    return [
        WatchProvider(
            "timeline",
            "ddl_doctor.recording.gathering:Gathering",
            settings=_timeline(),
            setting="timeline",
            doc="merges the ranks' parts of a timeline into one trace",
        )
    ]


@hookimpl
def ddl_recorders() -> list[RecorderProvider]:
    """Return the provider of the recorder that start_timeline() uses."""
    return [
        RecorderProvider(
            "timeline", "ddl_doctor.recording.recorder:TimelineRecorder", doc="records the timeline of a rank"
        )
    ]


def _timeline() -> tuple[Setting, ...]:
    """Return the settings of a timeline."""
    return (
        Setting(
            "timeline",
            str,
            "",
            "file for a timeline of all ranks, as a Chrome trace (read it by `ddl timeline summary FILE`); "
            "NAME.zip: a part for each rank, with a manifest for Perfetto; empty: none",
            group="output",
            brief="Write a timeline of all ranks to FILE.",
            metavar="FILE",
        ),
        Setting(
            "timeline_mark_cycles",
            bool,
            False,
            "in the timeline, mark where each period of a schedule begins",
            group="output",
        ),
    )
