"""A timeline of a world of threads: what its trace must say, read back from the file."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddl_doctor.recording.recorder import TimelineRecorder
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import runs_of, summarise

import ddlcore as ddl
from ddlcore.process.job import Job
from ddlcore.testing import World
from plugins.ddl_doctor.tests.recording.agreement import ahead_us, ends_apart

pytestmark = pytest.mark.timeout(270)

Event = dict[str, Any]
ORDER = ["NEGOTIATE_ALLREDUCE", "WAIT_FOR_DATA", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", "WIRE", "MEMCPY_OUT_FUSION_BUFFER"]


def record(
    size: int, file: Path, program: Callable[[int], None], backend: str = "threads", **settings: object
) -> tuple[Event, list[Event]]:
    """The trace of ``program(rank)`` on every rank."""

    def play(rank: int, job: Job) -> None:
        ddl.start_timeline(str(file), mark_cycles=True)
        program(rank)
        ddl.stop_timeline()

    with World(size, backend=backend, settings=settings) as world:
        world.run(play)
    assert not file.with_name(file.name + ".ranks").exists(), "the parts are merged and gone"
    return read_trace(file)


def steps(rank: int, count: int = 30) -> None:
    """Five tensors a step, the last of which comes late; once something that is no part of the loop."""
    for step in range(count):
        handles = [ddl.allreduce_async(np.full(100, step, np.float32), name=f"t{i}", op=ddl.Sum) for i in range(4)]
        time.sleep(0.001 * rank)
        handles.append(ddl.allreduce_async(np.full(10, step, np.float32), name="late", op=ddl.Sum))
        for handle in handles:
            handle.wait()
        if step == count - 5:
            ddl.allgather(np.ones((rank + 1, 2)), name="metric")


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_the_trace_of_a_world(backend: str, tmp_path: Path) -> None:
    """One process a rank; phases of each bucket in order; nothing negative; all ranks' buckets at one time; REPLAY and its ends."""
    metadata, events = record(3, tmp_path / "t.json", steps, backend)
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert all(one["complete"] and one["clock_offset_us"] == 0 for one in metadata["ranks"]), "one process, one clock"
    names = {event["name"] for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "QUEUE", "WAIT_FOR_DATA", f"{backend.upper()}_ALLREDUCE", "WAIT"} <= names
    assert {"REPLAY", "FREEZE", "DRAIN", "CYCLE_START", "SCHEDULE"} <= names
    if backend == "threads":
        assert {"MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"} <= names
    assert phases_out_of_order(events, backend) == []
    buckets = defaultdict(list)
    for run in runs_of(events):
        buckets[run.key].append(run)
    assert len(buckets) > 25
    for key, runs in buckets.items():
        assert sorted(run.pid for run in runs) == [0, 1, 2], key
    apart = ends_apart(runs_of(events), metadata)
    assert len(apart) > 20 and all(one.us <= one.took_us for one in apart), "one clock"


def test_clocks_that_had_to_be_measured_are_as_right_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no boot says that it is one clock: what is added is within its error of the truth, and so are the buckets' ends."""
    monkeypatch.setattr("ddl_doctor.recording.recorder.boot_id", lambda: "")
    metadata, events = record(3, tmp_path / "t.json", steps)
    looks = [event["args"] for event in events if event["name"] == "CLOCK"]
    assert len(looks) >= 3, "each rank looks"
    assert all(abs(one["offset_ns"]) <= one["error_ns"] for one in looks), "in truth it is one clock"
    assert any(one["clock_offset_us"] != 0 for one in metadata["ranks"])
    apart = ends_apart(runs_of(events), metadata)
    assert len(apart) > 20 and all(one.us <= one.took_us + one.error_us for one in apart)


@pytest.mark.parametrize("wrong_us", [-20_000, 20_000])
def test_a_clock_that_is_wrong_shows_in_the_ends_of_buckets(wrong_us: int, tmp_path: Path) -> None:
    """In either direction, and by how much: the test above would notice."""
    metadata, events = record(2, tmp_path / "t.json", steps)
    moved = [{**e, "ts": e["ts"] + wrong_us} if e["pid"] == 1 and "ts" in e else e for e in events]
    low, high = ahead_us(runs_of(moved), 1)
    assert low <= wrong_us <= high and high - low < abs(wrong_us) / 2
    assert any(one.us > one.took_us + one.error_us for one in ends_apart(runs_of(moved), metadata))


def phases_out_of_order(events: list[Event], backend: str) -> list[str]:
    """Of slices that follow each other within a bucket: those that begin before the one before has ended."""
    wrong = []
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] >= 10 and "entered_us" not in event.get("args", {}):
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, other in itertools.pairwise(row):
            if other["ts"] < one["ts"] + one["dur"] - 0.0015:  # two roundings to a nanosecond
                wrong.append(f"{one['name']} until {one['ts'] + one['dur']}, {other['name']} from {other['ts']}")
    for event in events:
        if event["ph"] == "X" and event["name"] == "ALLREDUCE":
            inside = [
                e["name"].replace(f"{backend.upper()}_ALLREDUCE", "WIRE")
                for e in rows[event["pid"], event["tid"]]
                if event["ts"] - 0.0015 <= e["ts"] < event["ts"] + event["dur"]
            ]
            if inside != sorted(inside, key=ORDER.index) or "WIRE" not in inside:
                wrong.append(f"{event['args']['bucket']}: {inside}")
    return wrong


def test_who_is_ready_when_is_marked_in_the_negotiation(tmp_path: Path) -> None:
    """In that of the lowest rank: a mark for each rank, within the slice."""
    _, events = record(3, tmp_path / "t.json", steps)
    slices = {e["args"]["bucket"]: e for e in events if e["name"] == "NEGOTIATE_ALLREDUCE" and e["pid"] == 0}
    marks = defaultdict(list)
    for event in events:
        if "ready" in event.get("args", {}):
            marks[event["args"]["ready"]].append(event)
    assert len(slices) > 2
    for bucket, one in slices.items():
        assert sorted(mark["name"] for mark in marks[bucket]) == ["0", "1", "2"]
        assert all(one["ts"] <= mark["ts"] <= one["ts"] + one["dur"] + 0.0015 for mark in marks[bucket])


def test_anonymous_calls_know_when_they_were_made(tmp_path: Path) -> None:
    """Whether they ran in discovery or from memory."""

    def program(rank: int) -> None:
        for _ in range(30):
            ddl.allreduce(np.ones(4))
            time.sleep(0.02)

    _, events = record(2, tmp_path / "t.json", program)
    replayed = [e for e in events if e["name"] == "ALLREDUCE" and "period" in e["args"]]
    assert len(replayed) > 30
    assert sum(e["args"]["entered_us"] < 15000 for e in replayed) > 0.5 * len(replayed), "not since the step before"


@pytest.mark.alone
def test_the_exposed_share_is_what_the_program_measures(tmp_path: Path) -> None:
    """Of each step, the part in which the program stands in ddl; and who works longer is the straggler."""
    work_s = (0.004, 0.010)
    measured_by: dict[int, list[float]] = {}

    def program(rank: int) -> None:
        grads = np.ones(1000, np.float32)
        measured = measured_by[rank] = []
        for _ in range(60):
            begun_s = time.perf_counter()
            time.sleep(work_s[rank])
            worked_s = time.perf_counter()
            ddl.allreduce_(grads, name="grads", op=ddl.Min)
            ended_s = time.perf_counter()
            measured.append((ended_s - worked_s) / (ended_s - begun_s))

    found = summarise(*record(2, tmp_path / "t.json", program, "shm"))
    assert [row.rank for row in found.ranks] == [0, 1] and found.ranks[1].steps > 10
    # a trace counts the steps of replay, which are the last: those of discovery are longer by what the network takes
    shares = [statistics.median(measured_by[row.rank][-row.steps :]) for row in found.ranks]
    assert [row.exposed for row in found.ranks] == pytest.approx(shares, abs=0.05)
    assert found.exposed > 0.15
    late = found.ranks[1]
    assert late.last > found.ranks[0].last and late.late_ms > 2


def test_only_one_timeline_at_a_time(tmp_path: Path) -> None:
    """A second start is refused and changes nothing; a second stop has no effect; then one may begin anew."""

    def program(rank: int, job: Job) -> None:
        for name in ("a.json", "b.json"):
            ddl.start_timeline(str(tmp_path / name))
            with pytest.raises(ValueError, match=r"stop_timeline\(\) first"):
                ddl.start_timeline(str(tmp_path / "c.json"))
            ddl.allreduce(np.ones(2), name="x")
            ddl.stop_timeline()
            ddl.stop_timeline()
        ddl.allreduce(np.ones(2), name="unseen")

    with World(2) as world:
        world.run(program)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    for name in ("a.json", "b.json"):
        text = (tmp_path / name).read_text()
        assert "allreduce.x" in text and "unseen" not in text
        json.loads(text)


def test_it_may_be_stopped_while_another_thread_is_about_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is about to tell that a schedule is replayed, and nobody listens any more: the job goes on."""
    stopped = []

    def program(rank: int, job: Job) -> None:
        job.start_timeline(str(tmp_path / "t.json"))
        epochs = job._parts._epochs
        planned = epochs.planned

        def stopping(schedule: int) -> Any:
            job._parts.timeline._listener = None
            stopped.append(rank)
            return planned(schedule)

        monkeypatch.setattr(epochs, "planned", stopping)
        for step in range(20):
            ddl.allreduce(np.full(4, step, np.float32), name="x")
        job.stop_timeline()

    with World(2) as world:
        world.run(program)
    assert sorted(set(stopped)) == [0, 1]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """In one line, and nothing is recorded."""
    (tmp_path / "file").write_text("")

    def program(rank: int, job: Job) -> None:
        with pytest.raises(ValueError, match="timeline") as caught:
            ddl.start_timeline(str(tmp_path / "file" / "t.json"))
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="is a directory; name a file"):
            ddl.start_timeline(str(tmp_path))
        ddl.stop_timeline()
        ddl.allreduce(np.ones(2))

    with World(2) as world:
        world.run(program)


def test_a_rank_that_does_not_stop_is_named_and_the_others_are_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 waits for it no longer than it says."""

    def program(rank: int, job: Job) -> None:
        job.start_timeline(str(tmp_path / "t.json"))
        ddl.allreduce(np.ones(2), name="x")
        if rank != 1:
            job.stop_timeline(patience_s=0.2)
        ddl.barrier()

    with World(2) as world:
        world.run(program)
        assert "rank 1 had not stopped it within 0.2 s" in caplog.text
        metadata, _ = read_trace(tmp_path / "t.json")
        assert [one["complete"] for one in metadata["ranks"]] == [True, False]


def test_a_rank_leaves_also_if_its_recorder_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others learn that it has left, and its threads end; the log has the traceback."""

    end = TimelineRecorder.end

    def broken(self: TimelineRecorder, patience_s: float, leaving: bool) -> None:
        end(self, patience_s, leaving)
        raise ZeroDivisionError("a fault of the plugin")

    monkeypatch.setattr(TimelineRecorder, "end", broken)
    with World(2, settings={"timeline": str(tmp_path / "t.json")}) as world:
        world.run(lambda rank, job: ddl.allreduce(np.ones(2), name="x"), last=True)
        assert {"ddl-engine-0", "ddl-engine-1"}.isdisjoint(thread.name for thread in threading.enumerate())
    assert caplog.text.count("the timeline could not be ended") == 2 and "a fault of the plugin" in caplog.text
