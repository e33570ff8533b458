"""Compute from a trace how the time of a step is divided, and which rank delays the other ranks.

All functions are pure: they only compute a result from their arguments.
"""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddl_doctor.recording.trace_writer import MEMCPY_IN, MEMCPY_OUT, WORLD
from ddl_doctor.timeline.intervals import Cover, Interval, common

Event = dict[str, Any]
SHOWN = 10  # rows of the tables of buckets and tensors


@dataclass(frozen=True)
class BucketRun:
    """One run of a bucket on one rank. Times are in µs on the clock of the trace."""

    pid: int
    key: str  # the same on all ranks that ran the bucket together
    kind: str
    begun: float  # time at which the bucket starts; then come copies and communication
    ended: float
    ready: float  # time at which the last of its tensors was submitted
    wire: float  # duration of the communication, including the wait for other ranks
    copied_in: float
    copied_out: float
    negotiated: float  # duration of its negotiation; 0 if it was replayed
    args: Mapping[str, Any]
    world: str = ""  # in which the rank ran it; numbers of buckets, schedules and epochs begin anew in each world

    @property
    def step(self) -> tuple[str, str, int, int] | None:
        """The step to which a replayed bucket belongs, as (world, epoch, schedule, period); None for other buckets."""
        if "period" not in self.args:
            return None
        return self.world, self.args["bucket"].split(".")[0], self.args["schedule"], self.args["period"]


@dataclass(frozen=True)
class RankRow:
    """The results for one rank. Each share (0 to 1) is a share of the time of a step.

    Times and shares are medians over the replayed steps. If no step was replayed, the whole recorded time counts as one
    step.
    """

    rank: int
    pid: int
    host: str
    steps: int
    step_ms: float
    exposed: float  # share in which the user's thread waited in ddl
    communication: float  # share in which buckets were in flight
    overlap: float  # part of ``communication`` in which the user's thread did not wait, as a share of ``communication``
    last: int  # number of buckets for which this rank was the last; if any were replayed, only replayed buckets count
    late_ms: float  # median of this rank's delays in these buckets, relative to the median of the other ranks
    offset_us: float | None  # the coordinator's clock minus this rank's clock; 0 if both read the same clock
    error_us: float | None  # error of ``offset_us``; None: the two clocks were never compared
    complete: bool  # whether the end of the rank's file was written


@dataclass(frozen=True)
class BucketRow:
    """The results for one bucket: all its runs, on all ranks together."""

    names: str
    kind: str
    count: int
    tensors: int
    nbytes: int
    wire_ms: float  # mean
    share: float  # share of all communication time


@dataclass(frozen=True)
class TensorRow:
    """The results for a tensor that was submitted after all other tensors of its bucket."""

    name: str
    count: int  # the number of times that this tensor was the last
    held_ms: float  # mean time between the submission of the last tensor but one and of this tensor


@dataclass(frozen=True)
class WorldRow:
    """One world of an elastic job. Ranks are those of the launch."""

    generation: int
    at_s: float  # time at which its first rank began to record
    size: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    recomputed: int  # steps
    still_s: float
    text: str  # what the user was told


@dataclass(frozen=True)
class Summary:
    """The results that `ddl timeline summary` shows."""

    ranks: list[RankRow]
    buckets: list[BucketRow]
    tensors: list[TensorRow]
    replayed: int  # number of buckets, over all ranks
    negotiated: int
    negotiation_s: float  # sum over all ranks
    wire_s: float
    copy_s: float
    tensors_a_bucket: float
    bytes_a_bucket: float
    fusion_bytes: int
    changes: dict[str, int] = field(default_factory=dict)  # REPLAY, FREEZE, DRAIN: counts of the rank with the most
    worlds: list[WorldRow] = field(default_factory=list)  # of an elastic job

    @property
    def exposed(self) -> float:
        """The share of a step (0 to 1) in which a user's thread waits in ddl, as the mean over the ranks."""
        return statistics.fmean(row.exposed for row in self.ranks) if self.ranks else 0.0


def runs_of(events: Sequence[Event]) -> list[BucketRun]:
    """Return all runs of buckets in the ``events`` of a trace, in the order of their start."""
    slices = [event for event in events if event.get("ph") == "X"]
    worlds = _Worlds(events)
    phases: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for one in slices:
        phases[one["pid"], one["tid"]].append(one)
    found = []
    for (pid, _), row in phases.items():
        row.sort(key=lambda one: (one["ts"], -one["dur"]))
        for i, top in enumerate(row):
            args = top.get("args", {})
            if "entered_us" in args:
                found.append(_run(pid, top, row, i, worlds.at(pid, top["ts"])))
    return sorted(found, key=lambda run: run.begun)


class _Worlds:
    """The names of the worlds in which each rank has recorded, by time."""

    def __init__(self, events: Iterable[Event]) -> None:
        begun: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for event in events:
            if event.get("name") == "TIMELINE":
                begun[event["pid"]].append((event["ts"], str(event["args"].get("world", ""))))
        self._since = {pid: [at for at, _ in sorted(names)] for pid, names in begun.items()}
        self._names = {pid: [name for _, name in sorted(names)] for pid, names in begun.items()}

    def at(self, pid: int, at_us: float) -> str:
        """Return the world of rank ``pid`` (of its launch) at ``at_us``; "" if the trace does not say."""
        names = self._names.get(pid)
        return names[max(bisect(self._since[pid], at_us) - 1, 0)] if names else ""


def _run(pid: int, top: Event, row: Sequence[Event], at: int, world: str) -> BucketRun:
    args, begun, ended = top["args"], top["ts"] + top["args"]["entered_us"], top["ts"] + top["dur"]
    before: Event = row[at - 1] if at else {"name": ""}
    asked = before["name"].startswith("NEGOTIATE_") and before["args"]["bucket"] == args["bucket"]
    negotiated = float(before["dur"]) if asked else 0.0
    wire = copied_in = copied_out = 0.0
    for one in row[at + 1 :]:
        if one["ts"] >= ended or "entered_us" in one.get("args", {}):
            break
        if one["name"] == MEMCPY_IN:
            copied_in += one["dur"]
        elif one["name"] == MEMCPY_OUT:
            copied_out += one["dur"]
        elif one["name"].endswith("_" + top["name"]):
            wire += one["dur"]
    ready = top["ts"] - negotiated + max(args["ready_us"], default=0.0)
    key = f"{world}.{args['set']}.{args['bucket']}"
    return BucketRun(pid, key, top["name"], begun, ended, ready, wire, copied_in, copied_out, negotiated, args, world)


def waits_of(events: Iterable[Event]) -> dict[int, list[Interval]]:
    """Return the intervals, in µs on the clock of the trace, in which a user's thread waited in ddl, by pid.

    In a trace, a rank is shown as a process; the number of this process is the pid.
    """
    waits: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("name") == "WAIT":
            waits[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    return dict(waits)


def summarise(metadata: Mapping[str, Any], events: Sequence[Event]) -> Summary:
    """Return the summary of a trace. ``metadata`` and ``events`` are the results of ``read_trace``."""
    runs = runs_of(events)
    waits = waits_of(events)
    changes: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.get("name") in ("REPLAY", "FREEZE", "DRAIN") and event.get("ph") in ("B", "X"):
            changes[event["pid"]][event["name"]] += 1
    late = _stragglers([run for run in runs if run.step is not None] or runs)
    by_rank: dict[int, list[BucketRun]] = defaultdict(list)
    for run in runs:
        by_rank[run.pid].append(run)
    said = _said(metadata)
    ranks = [_rank_row(pid, said.get(pid, {}), by_rank[pid], waits.get(pid, []), late[pid]) for pid in sorted(by_rank)]
    most = max(changes.values(), key=lambda counted: sum(counted.values()), default=Counter())
    fused = [run for run in runs if run.kind == "ALLREDUCE"]
    return Summary(
        ranks=ranks,
        buckets=_bucket_rows(runs, events),
        tensors=_tensor_rows(runs, events),
        replayed=sum(run.step is not None for run in runs),
        negotiated=sum(run.step is None for run in runs),
        negotiation_s=sum(run.negotiated for run in runs) / 1e6,
        wire_s=sum(run.wire for run in runs) / 1e6,
        copy_s=sum(run.copied_in + run.copied_out for run in runs) / 1e6,
        tensors_a_bucket=statistics.fmean(run.args["tensors"] for run in fused) if fused else 0.0,
        bytes_a_bucket=statistics.fmean(run.args["nbytes"] for run in fused) if fused else 0.0,
        fusion_bytes=max((int(one.get("fusion_bytes", 0)) for one in said.values()), default=0),
        changes=dict(most),
        worlds=worlds_of(events),
    )


def worlds_of(events: Iterable[Event]) -> list[WorldRow]:
    """Return the worlds of an elastic job, in their order; an empty list if the job was not elastic."""
    marks = [event for event in events if event.get("name", "").startswith(WORLD) and event.get("ph") == "i"]
    first: dict[int, WorldRow] = {}
    for mark in sorted(marks, key=lambda event: event["ts"]):
        args = mark["args"]
        lost, joined, left = (tuple(args[name]) for name in ("lost", "joined", "left"))
        at_s, again = mark["ts"] / 1e6, args["recomputed"]
        row = WorldRow(args["generation"], at_s, args["size"], lost, joined, left, again, args["still_s"], args["text"])
        first.setdefault(row.generation, row)
    return [first[generation] for generation in sorted(first)]


def _said(metadata: Mapping[str, Any]) -> dict[int, Event]:
    """Return by rank (its pid) what the trace says of it; a rank of several worlds has several parts, or processes."""
    said: dict[int, Event] = {}
    for one in metadata.get("ranks", ()):
        before = said.get(one["pid"], one)
        errors = [part["clock_error_us"] for part in (before, one) if part.get("clock_error_us") is not None]
        complete = bool(before.get("complete", True) and one.get("complete", True))
        said[one["pid"]] = {**before, **one, "clock_error_us": max(errors, default=None), "complete": complete}
    return said


def _rank_row(
    pid: int, said: Mapping[str, Any], runs: Sequence[BucketRun], waits: Sequence[Interval], late: list[float]
) -> RankRow:
    busy, stood = Cover((run.begun, run.ended) for run in runs), Cover(waits)
    both = Cover(common(stood.intervals, busy.intervals))
    spans = steps_of(runs)
    steps = len(spans)
    if not spans:
        spans = [(runs[0].ready, max(run.ended for run in runs))]
    spans = [span for span in spans if span[1] > span[0]] or [(0.0, 1.0)]
    lengths = [end - begin for begin, end in spans]
    exposed = [stood.of(span) / length for span, length in zip(spans, lengths)]
    communication = [busy.of(span) / length for span, length in zip(spans, lengths)]
    hidden = [
        1.0 - both.of(span) / under_way
        for span, length, share in zip(spans, lengths, communication)
        if (under_way := share * length) > 0
    ]
    return RankRow(
        rank=int(said.get("rank", pid)),
        pid=pid,
        host=str(said.get("host", "")),
        steps=steps,
        step_ms=statistics.median(lengths) / 1000,
        exposed=statistics.median(exposed),
        communication=statistics.median(communication),
        overlap=statistics.median(hidden) if hidden else 0.0,
        last=len(late),
        late_ms=statistics.median(late) / 1000 if late else 0.0,
        offset_us=said.get("clock_offset_us"),
        error_us=said.get("clock_error_us"),
        complete=bool(said.get("complete", True)),
    )


def steps_of(runs: Sequence[BucketRun]) -> list[Interval]:
    """Return the begin and the end of each step that was replayed on one rank, in µs on the clock of the trace.

    ``runs`` are the runs of buckets on this rank. A step ends at the end of its last bucket, and begins at the end of
    the step before. If the step before was not replayed, the step is left out.
    """
    ends: dict[tuple[str, str, int, int], float] = {}
    for run in runs:
        if run.step is not None:
            ends[run.step] = max(ends.get(run.step, 0.0), run.ended)
    return [
        (before, end)
        for (world, epoch, schedule, period), end in ends.items()
        if (before := ends.get((world, epoch, schedule, period - 1)))
    ]


def _stragglers(runs: Sequence[BucketRun]) -> dict[int, list[float]]:
    """Return the delays in µs of the ranks that came last, by the rank's pid: one delay for each bucket.

    The delay is the difference between the time at which the last rank came to the bucket and the median of the times
    of the other ranks. For a replayed bucket, a rank's time is the begin of the bucket on this rank. For a negotiated
    bucket, it is the time at which all tensors were ready on this rank. So a delay comes from a rank's own work, and
    not from the network.
    """
    buckets: dict[str, list[BucketRun]] = defaultdict(list)
    for run in runs:
        buckets[run.key].append(run)
    late: dict[int, list[float]] = defaultdict(list)
    for members in buckets.values():
        if len({run.pid for run in members}) < 2:
            continue
        came = sorted((run.begun if run.step is not None else run.ready, run.pid) for run in members)
        behind = came[-1][0] - statistics.median(at for at, _ in came[:-1])
        late[came[-1][1]].append(behind)
    return late


def _bucket_rows(runs: Sequence[BucketRun], events: Sequence[Event]) -> list[BucketRow]:
    names = _scheduled(events)
    groups: dict[tuple[Any, ...], list[BucketRun]] = defaultdict(list)
    for run in runs:
        # A schedule of another world has the same number; the same buckets of it are one row.
        called = tuple(map(_plain, names.get(_place(run), run.args["names"])))
        groups[run.kind, _place(run)[1:], called].append(run)
    whole = sum(run.wire for run in runs) or 1.0
    rows = []
    for (kind, _, called), alike in groups.items():
        first = alike[0].args
        wire = sum(run.wire for run in alike)
        rows.append(
            BucketRow(
                _short(called), kind, len(alike), first["tensors"], max(run.args["nbytes"] for run in alike),
                wire / len(alike) / 1000, wire / whole,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.share)[:SHOWN]


def _tensor_rows(runs: Sequence[BucketRun], events: Sequence[Event]) -> list[TensorRow]:
    names = _scheduled(events)
    held: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        ready = run.args["ready_us"]
        called = names.get(_place(run), run.args["names"])
        if len(ready) < 2 or len(called) != len(ready):
            continue
        *_, before, latest = sorted(ready)
        held[called[ready.index(latest)] or "(a call without a name)"].append(latest - before)
    rows = [TensorRow(name, len(times), statistics.fmean(times) / 1000) for name, times in held.items()]
    return sorted(rows, key=lambda row: -row.held_ms * row.count)[:SHOWN]


def _place(run: BucketRun) -> tuple[Any, ...]:
    """Return the place of a bucket in a schedule; () if it was negotiated."""
    return (run.world, run.args["schedule"], run.args["position"]) if "position" in run.args else ()


def _scheduled(events: Sequence[Event]) -> dict[Any, list[str]]:
    """Return by place the names of all tensors of its bucket."""
    worlds = _Worlds(events)
    told = [event for event in events if event.get("name") == "SCHEDULE"]
    return {
        (worlds.at(one["pid"], one["ts"]), one["args"]["schedule"], one["args"]["position"]): one["args"]["names"]
        for one in told
    }


def _short(names: Sequence[str]) -> str:
    if not names:
        return ""
    first, last = (_plain(name) or "(a call without a name)" for name in (names[0], names[-1]))
    return first if len(names) < 2 else f"{first} … {last}"


def _plain(name: str) -> str:
    """Return ``name``, or "" if ``name`` was generated for a call without a name.

    A generated name occurs only once, so it cannot identify the same bucket in several steps.
    """
    return "" if name.startswith("noname.") else name
