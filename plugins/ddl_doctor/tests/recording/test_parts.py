"""The ring, the clock, a rank's part and the merge, without a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from ddl_doctor.recording.clock import compare
from ddl_doctor.recording.merge import merge, read_part
from ddl_doctor.recording.part_writer import Timeline, TraceFile
from ddl_doctor.recording.readiness import Readiness
from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddl_doctor.recording.trace_writer import TraceWriter
from ddl_doctor.timeline.reading import read_trace

from ddlcore.messages.to_rank import Bucket
from ddlcore.observe.clock import Reading
from ddlcore.observe.timeline_parts import part_of, parts_in
from ddlcore.types import Kind

pytestmark = pytest.mark.timeout(240)


def test_a_ring_gives_what_was_put_in_order() -> None:
    """Each once; an empty one gives nothing."""
    ring = RingBuffer(8)
    assert list(ring.take()) == []
    for i in range(5):
        ring.put(RecordKind.FREEZE, i)
    assert [record[2] for record in ring.take()] == [0, 1, 2, 3, 4]
    assert list(ring.take()) == []
    ring.put(RecordKind.FREEZE, 5)
    assert [record[2] for record in ring.take()] == [5]
    assert ring.lost == 0


def test_a_ring_that_is_not_emptied_loses_the_oldest_and_says_so() -> None:
    """What is lost and what is given add up to what was put."""
    ring = RingBuffer(4)
    for i in range(6):
        ring.put(RecordKind.FREEZE, i)
    given = [record[2] for record in ring.take()]
    assert given[0] == 4 and given == sorted(given)
    assert ring.lost + len(given) == 6
    for i in range(6, 9):
        ring.put(RecordKind.FREEZE, i)
    assert [record[2] for record in ring.take()] == [6, 7, 8]


def test_the_answer_with_the_shortest_way_tells_the_offset() -> None:
    """The error is half of that way, and the truth lies within."""
    truth, now = 1_000_000, 0
    ways = iter([(9000, 1000), (300, 500), (100, 8000), (700, 900), (2000, 2000), (4000, 10), (600, 400), (5000, 5000)])

    def clock() -> int:
        return now

    def ask() -> Reading:
        nonlocal now
        there, back = next(ways)
        now += there
        reading = Reading(now + truth, "other")
        now += back
        return reading

    offset, error = compare(ask, clock, "here")
    assert error == 400
    assert abs(offset - truth) <= error


@pytest.mark.parametrize(("shift", "expected"), [(0, (0, 50)), (5_000_000, (5_000_000, 50))])
def test_one_boot_is_one_clock_unless_the_answers_contradict(shift: int, expected: tuple[int, int]) -> None:
    """A time namespace may shift the clock of the same kernel."""
    now = iter(range(0, 10**6, 100))
    asked = [0]

    def clock() -> int:
        asked[0] = next(now)
        return asked[0]

    assert compare(lambda: Reading(asked[0] + 50 + shift, "boot"), clock, "boot") == expected


def test_a_part_is_whole_json_after_every_write(tmp_path: Path) -> None:
    """From the first moment on."""
    file = TraceFile(part_of(tmp_path, 3))
    assert json.loads(file.path.read_text()) == []
    for i in range(5):
        file.add([json.dumps({"name": "a" * i, "ts": i}), json.dumps({"name": "b", "ts": i})])
        file.add([])
        assert len(json.loads(file.path.read_text())) == 2 * (i + 1)
    file.close()
    assert part_of(tmp_path, 3).name == "rank3.1.json", "a second one of the same rank stands beside it"


WRITER = """
import json
import sys
from pathlib import Path
from ddl_doctor.recording.part_writer import TraceFile
file = TraceFile(Path(sys.argv[1]))
n = 0
while True:
    file.add([json.dumps({"name": "x" * 40, "ts": n + i}) for i in range(50)])
    n += 50
    if n == 500:
        print("going", flush=True)
"""


def test_a_part_is_whole_json_after_sigkill(tmp_path: Path) -> None:
    """Killed while it writes without a pause."""
    path = tmp_path / "rank0.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    events = read_part(path).events
    assert len(events) >= 500
    assert [event["ts"] for event in events] == list(range(len(events)))


def names_of(count: int, since: int = 0) -> list[str]:
    """Events; their names hold what is more than a byte, or ends a line elsewhere."""
    return [json.dumps({"name": f"größe\u2028µ{i}", "ts": i}, ensure_ascii=False) for i in range(since, since + count)]


def test_a_part_that_is_cut_anywhere_loses_only_the_torn_record(tmp_path: Path) -> None:
    """At every byte of its last kB: what stands there whole is read, and nothing else."""
    file = TraceFile(tmp_path / "rank0.json")
    file.add(names_of(30))
    file.add(names_of(30, since=30))
    file.close()
    whole = file.path.read_bytes()
    ends = [whole.index(text.encode()) + len(text.encode()) for text in names_of(60)]
    for cut in range(len(whole) - 1024, len(whole) + 1):
        file.path.write_bytes(whole[:cut])
        stamps = [event["ts"] for event in read_part(file.path).events]
        assert stamps == list(range(sum(end <= cut for end in ends))), whole[:cut][-60:]


def test_a_write_that_is_torn_anywhere_loses_nothing_of_what_stood_there(tmp_path: Path) -> None:
    """It goes over the list's end, of which some is left where only a byte or two were written."""
    file = TraceFile(tmp_path / "rank0.json")
    file.add(names_of(5))
    before = file.path.read_bytes()
    file.add(names_of(3, since=5))
    file.close()
    after = file.path.read_bytes()
    begin = len(before) - len("\n]\n")
    for written in range(len(after) - begin + 1):
        torn = after[: begin + written] + before[begin + written :]
        file.path.write_bytes(torn)
        stamps = [event["ts"] for event in read_part(file.path).events]
        assert stamps == list(range(len(stamps))) and len(stamps) >= 5, torn[-60:]
    assert len(stamps) == 8


def test_a_part_that_ends_before_its_clock_was_looked_at_says_so(tmp_path: Path) -> None:
    """Not that its clock is right."""
    part(tmp_path, 0, 0)
    lines = [line for line in (tmp_path / "rank0.json").read_text().splitlines() if "CLOCK" not in line]
    (tmp_path / "rank1.json").write_text("\n".join(lines).replace('"rank": 0', '"rank": 1'))
    merge(parts_in(tmp_path), tmp_path / "t.json")
    metadata, _ = read_trace(tmp_path / "t.json")
    assert [one["clock_error_us"] for one in metadata["ranks"]] == [0.7, None]
    assert [one["clock_offset_us"] for one in metadata["ranks"]] == [0.0, None]


def test_a_part_that_was_cut_within_a_line_gives_its_whole_lines(tmp_path: Path) -> None:
    """A disk that was full, a copy that was broken off."""
    path = tmp_path / "rank0.json"
    path.write_text('[\n{"name":"a","ts":1},\n{"name":"b","ts":2},\n{"name":"c","t')
    assert [event["name"] for event in read_part(path).events] == ["a", "b"]


def test_a_part_alone_is_read_also_where_it_was_cut(tmp_path: Path) -> None:
    """As merging does."""
    path = tmp_path / "rank3.json"
    path.write_text(
        '[\n{"name":"TIMELINE","pid":3,"ts":1,"args":{"rank":3}},\n{"name":"b","pid":3,"ts":2},\n{"name":"c","t'
    )
    metadata, events = read_trace(path)
    assert [one["rank"] for one in metadata["ranks"]] == [3]
    assert [event["name"] for event in events] == ["TIMELINE", "b"]


@pytest.mark.parametrize("text", ['[{"name":"CLOCK","ts":1}]', '[{"name":"TIMELINE"}]', '[{"pid":"a"}]'])
def test_a_foreign_list_of_events_spoils_no_merge(text: str, tmp_path: Path) -> None:
    """It is named, and left out."""
    (tmp_path / "rank1.json").write_text(text)
    part(tmp_path, 0, 0)
    problems = merge(parts_in(tmp_path), tmp_path / "t.json")
    assert len(problems) == 1 and "rank1.json" in problems[0] and "\n" not in problems[0]
    assert [one["pid"] for one in read_trace(tmp_path / "t.json")[0]["ranks"]] == [0]


def test_a_coordinator_that_does_not_answer_holds_no_record_up(tmp_path: Path) -> None:
    """What stands in the ring is written before the clock is asked for."""
    answer = threading.Event()
    ring = RingBuffer()

    def clock() -> tuple[int, int] | None:
        answer.wait(120)
        return None

    writer = TraceWriter(0, 0, "h", lambda set_id, kind: "shm")
    timeline = Timeline(ring, writer, tmp_path / "rank0.json", {"rank": 0}, clock)
    ring.put(RecordKind.WAITED, 1000, 2000)
    timeline.start()
    timeline.stop(1.0)
    try:
        assert "WAIT" in {event["name"] for event in read_part(timeline.path).events}
    finally:
        answer.set()


def test_anonymous_calls_that_are_negotiated_are_forgotten() -> None:
    """Else a long recording would keep a name for each."""
    ready = Readiness()
    for i in range(100):
        name = f"noname.{i}"
        ready.one(0, name, b"spec", 10 * i)
        assert ready.of(Bucket(i, 0, Kind.ALLREDUCE, (name,)), 10 * i + 5) == [10 * i]
    assert sum(map(len, ready._anonymous.values())) <= 1


def part(directory: Path, rank: int, offset_ns: int, late_us: float = 0.0) -> None:
    """A part of one bucket, whose clock is ``offset_ns`` behind the coordinator's."""
    shift = -offset_ns / 1000
    file = TraceFile(directory / f"rank{rank}.json")
    args = {
        "tensors": 2,
        "nbytes": 8,
        "set": 0,
        "ready_us": [0.0, late_us],
        "bucket": "d0",
        "names": ["a", "b"],
        "entered_us": 1.0,
    }
    events = (
            {"name": "TIMELINE", "ph": "i", "pid": rank, "tid": 2, "ts": 1000 + shift, "args": {"rank": rank, "world": "w"}},
            {"name": "CLOCK", "ph": "i", "pid": rank, "tid": 2, "ts": 1000 + shift, "args": {"offset_ns": offset_ns, "error_ns": 700}},
            {"name": "NEGOTIATE_ALLREDUCE", "ph": "X", "pid": rank, "tid": 10, "ts": 2000 + shift, "dur": 50.0, "args": {"bucket": "d0"}},
            {"name": "ALLREDUCE", "ph": "X", "pid": rank, "tid": 10, "ts": 2050 + shift, "dur": 100.0, "args": args},
    )  # fmt: skip
    file.add([json.dumps(event) for event in events])
    file.close()


def test_merging_brings_all_parts_to_one_clock(tmp_path: Path) -> None:
    """Ranks' clocks are 5 ms and -3 ms off; in the trace the bucket stands at one place, and marks say who was ready when."""
    part(tmp_path, 0, 0)
    part(tmp_path, 1, 5_000_000, late_us=30.0)
    part(tmp_path, 2, -3_000_000, late_us=10.0)
    target = tmp_path / "t.json"
    assert merge(parts_in(tmp_path), target) == []
    metadata, events = read_trace(target)
    assert [one["clock_offset_us"] for one in metadata["ranks"]] == [0.0, 5000.0, -3000.0]
    assert {one["clock_error_us"] for one in metadata["ranks"]} == {0.7}
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert {(e["ts"], e["dur"]) for e in events if e["name"] == "ALLREDUCE"} == {(1050.0, 100.0)}
    marks = {e["name"]: e["ts"] for e in events if "ready" in e.get("args", {})}
    assert marks == {"0": 1000.0, "1": 1030.0, "2": 1010.0}


def test_a_zip_holds_a_part_for_each_rank_and_perfettos_manifest(tmp_path: Path) -> None:
    """Aligned already; `ddl timeline` reads it like the other form."""
    part(tmp_path, 0, 0)
    part(tmp_path, 1, 5_000_000)
    merge(parts_in(tmp_path), tmp_path / "t.json")
    merge(parts_in(tmp_path), tmp_path / "t.zip")
    with zipfile.ZipFile(tmp_path / "t.zip") as archive:
        assert sorted(archive.namelist()) == ["perfetto_manifest.json", "rank0.json", "rank1.json"]
        manifest = json.loads(archive.read("perfetto_manifest.json"))["perfetto_manifest"]
    assert manifest["version"] == 1
    assert [file["path"] for file in manifest["files"]] == ["rank0.json", "rank1.json"]
    assert read_trace(tmp_path / "t.zip") == read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("text", ["", "no", '{"a": 1}', "[1, 2]"])
def test_what_is_no_trace_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    """It names the file."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
