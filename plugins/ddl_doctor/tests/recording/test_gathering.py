"""``ddl run --timeline`` and ``ddl timeline``: the ranks' parts of any host become one trace, also where ranks were killed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ddl_doctor.recording.gathering import Gathering
from ddl_doctor.recording.merge import merge
from ddl_doctor.recording.part_writer import TraceFile, make_directory
from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddl_doctor.recording.trace_writer import TraceWriter
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import runs_of, summarise, worlds_of
from msgspec.structs import asdict

from ddlcore.commands.cli import main
from ddlcore.launch.job.watch import RunningRanks, WatchedJob
from ddlcore.messages.coding import encode
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.plug.settings import settings_of
from ddlcore.text.plain import plain
from ddlcore.types import DType, Kind
from plugins.ddl_doctor.tests.recording.agreement import ends_apart
from tests.launch.standin import STAND_IN_WORKS, install_ssh
from tests.launch.starting import Ddl

processes = pytest.mark.processes
SCRIPT = """
import os, signal, sys, time
import numpy as np
import ddlcore as ddl
ddl.init()
for step in range(60):
    ddl.allreduce(np.full(64, step, np.float32), name="grads", op=ddl.Sum)
    time.sleep(0.01)
if ddl.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
ddl.shutdown()
"""


@processes
def test_a_rank_that_is_killed_leaves_its_part(ddl: Ddl, tmp_path: Path) -> None:
    """All but its last fifth of a second; the others' is complete, and nothing but the trace is left."""
    (tmp_path / "loop.py").write_text(SCRIPT)
    done = ddl("run", "-np", "2", "--timeline", "t.json", "python", "loop.py", "1")
    assert done.returncode == 137
    assert "timeline in" in done.stderr and "`ddl timeline summary" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.py", "t.json"]
    metadata, events = read_trace(tmp_path / "t.json")
    assert [one["complete"] for one in metadata["ranks"]] == [True, False]
    counts: dict[int, int] = defaultdict(int)
    for run in runs_of(events):
        counts[run.pid] += 1
    assert counts[0] == 60
    assert counts[1] >= 30


ELASTIC = """
import os, signal, time
import numpy as np
import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
ddl.init()
part, place = "t.json.ranks/rank1.json", os.environ["DDL_RANK"]
@run
def train(state):
    last = state.steps + 30
    if ddl.stats()["world"]["generation"] == 2:
        open("second", "w").close()
    while ddl.stats()["world"]["generation"] < 3 or state.steps < last:
        ddl.allreduce(np.full(64, 1, np.float32), name="grads", op=ddl.Sum)
        if place == "1" and ddl.stats()["world"]["generation"] == 1 and state.steps >= 30:
            while '"ALLREDUCE"' not in open(part).read():
                time.sleep(0.01)
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        time.sleep(0.002)
while place == "1" and os.path.exists("killed") and not os.path.exists("second"):
    time.sleep(0.01)  # otherwise the second world might have this process already
train(ObjectState())
"""


@processes
def test_the_timeline_of_an_elastic_job(ddl: Ddl, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mark of each world on each of its ranks; the records of the process that was killed; all in the row of their rank."""
    (tmp_path / "loop.py").write_text(ELASTIC)
    done = ddl("run", "-np", "3", "--min-np", "2", "--timeline", "t.json", "python", "loop.py")
    assert done.returncode == 0, done.stderr
    assert "ddl run: timeline in" in done.stderr
    assert not (tmp_path / "t.json.ranks").exists()
    metadata, events = read_trace(tmp_path / "t.json")
    recorded = sorted((one["world"], one["rank"], one["complete"]) for one in metadata["ranks"])
    assert recorded == [
        ("world1", 0, True), ("world1", 1, False), ("world1", 2, True), ("world2", 0, True), ("world2", 2, True),
        ("world3", 0, True), ("world3", 1, True), ("world3", 2, True),
    ]  # fmt: skip
    titles = {
        (event["pid"], event["args"]["name"].split(" (")[0]) for event in events if event["name"] == "process_name"
    }
    assert titles == {(0, "rank 0"), (1, "rank 1"), (2, "rank 2")}
    ran = {(run.world, run.pid) for run in runs_of(events)}
    assert ran == {(world, rank) for world, rank, _ in recorded}, "the process that was killed has left its records"
    marks = sorted((event["name"], event["pid"]) for event in events if event["name"].startswith("WORLD "))
    assert marks == [(f"WORLD {world[-1]}", rank) for world, rank, _ in recorded]
    first, second, third = worlds_of(events)
    assert (first.size, first.lost, first.joined) == (3, (), ())
    assert (second.size, second.lost, second.joined, second.recomputed) == (2, (1,), (), 1)
    assert (third.size, third.lost, third.joined, third.recomputed) == (3, (), (1,), 0)
    assert first.at_s < second.at_s < third.at_s and second.still_s > 0
    assert f"ddl run: {second.text}\n" in done.stderr and f"ddl run: {third.text}\n" in done.stderr
    page = tmp_path / "t.html"
    assert main(["timeline", "summary", str(tmp_path / "t.json"), "--html", str(page)]) == 0
    for shown in (capsys.readouterr().out, page.read_text()):
        assert "The job had 3 worlds (ranks lost: 1, joined: 1): " in shown and "Worlds" in shown
        assert "1 step was computed again" in shown and "The file of rank 1 is incomplete" in shown


@pytest.mark.alone
@processes
def test_the_ends_of_a_bucket_agree_within_the_clock_error_that_is_stated(ddl: Ddl, tmp_path: Path) -> None:
    """On one clock, too: but for ranks that had no core when theirs came, and no rank has a sum before all have begun."""
    (tmp_path / "loop.py").write_text(SCRIPT)
    done = ddl("run", "-np", "2", "--timeline", "t.json", "python", "loop.py", "-1")
    assert done.returncode == 0, done.stderr
    metadata, events = read_trace(tmp_path / "t.json")
    assert [one["clock_offset_us"] for one in metadata["ranks"]] == [0.0, 0.0]
    assert all(0 < one["clock_error_us"] < 5_000 for one in metadata["ranks"])
    apart = [one for one in ends_apart(runs_of(events), metadata) if one.replayed]
    assert len(apart) > 20
    assert all(one.us <= one.took_us for one in apart)
    within = sum(one.us <= one.error_us for one in apart)
    assert within > 0.75 * len(apart), sorted(one.us for one in apart)


@pytest.mark.long
@processes
@STAND_IN_WORKS
@pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed")
def test_parts_of_other_hosts_come_back_through_their_agents(ddl: Ddl, tmp_path: Path) -> None:
    """Of a rank that was killed, too; hosts share no directory for it, and keep nothing."""
    (tmp_path / "loop.py").write_text(SCRIPT)
    (tmp_path / "there").mkdir()
    env = {**install_ssh(tmp_path / "bin"), "TMPDIR": str(tmp_path / "there")}
    done = ddl("run", "-H", "h1:1,h2:1", "--backend", "gloo", "--timeline", "t.zip", "python", "loop.py", "1", env=env)
    assert done.returncode == 137, done.stderr
    assert not (tmp_path / "t.zip.ranks").exists()
    assert list((tmp_path / "there").glob("ddl-timeline-*")) == []
    metadata, events = read_trace(tmp_path / "t.zip")
    assert [(one["rank"], one["complete"]) for one in metadata["ranks"]] == [(0, True), (1, False)]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event["name"] == "GLOO_ALLREDUCE" for event in events)


@processes
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(ddl: Ddl, tmp_path: Path) -> None:
    """Exit code 2, one line."""
    (tmp_path / "file").write_text("")
    done = ddl("run", "-np", "2", "--timeline", "file/t.json", "touch", "started")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "--timeline file/t.json" in done.stderr
    assert not (tmp_path / "started").exists()


# --- ddl timeline


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of two ranks: three steps of 10 ms, of which rank 0 waits 4, and rank 1, which comes last, 1."""
    events = []
    for pid, wait in ((0, 4000.0), (1, 1000.0)):
        for period in range(4):
            end = (period + 1) * 10_000.0
            args = {
                "bucket": f"e1.p{period}", "period": period, "schedule": 0, "position": 0, "set": 0, "tensors": 2, "nbytes": 4096,
                "names": ["a", "<b>"], "ready_us": [0.0, 500.0], "entered_us": 600.0,
            }  # fmt: skip
            begin = end - wait
            whole = {"name": "ALLREDUCE", "ph": "X", "pid": pid, "tid": 10, "ts": begin - 600, "dur": wait + 600}
            wire = {"name": "SHM_ALLREDUCE", "ph": "X", "pid": pid, "tid": 10, "ts": begin, "dur": wait}
            events += [{**whole, "args": args}, wire]
            events.append({"name": "WAIT", "ph": "X", "pid": pid, "tid": 1, "ts": begin, "dur": wait})
    ranks = [
        {
            "pid": pid,
            "rank": pid,
            "host": "h",
            "fusion_bytes": 8192,
            "clock_offset_us": 0.0,
            "clock_error_us": 9.0,
            "complete": True,
        }
        for pid in (0, 1)
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"metadata": {"ranks": ranks}, "traceEvents": events}))
    return path


def test_the_summary_names_shares_stragglers_and_tensors(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, as tables, and as JSON."""
    assert main(["timeline", "summary", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "25.0% of a step (10.00 ms, median of 3 that ran from memory) is spent waiting in ddl" in out
    assert (
        "Rank 1 delays the others most: it comes last to 100% of the buckets, 3.000 ms after the others (median)."
        in out
    )
    assert "holds 2.0 tensors, 4.0 KiB of 8.0 KiB that fusion allows" in out
    assert "8 buckets ran from memory and 0 were negotiated" in out
    assert main(["timeline", "summary", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exposed"] == pytest.approx(0.25)
    assert [row["exposed"] for row in found["ranks"]] == pytest.approx([0.4, 0.1])
    assert found["tensors"] == [{"name": "<b>", "count": 8, "held_ms": 0.5}]


@pytest.mark.parametrize(
    ("offsets", "errors", "said"),
    [
        (
            (0.0, 0.0),
            (9.0, 30.5),
            "All ranks use the same clock. The times that two ranks note for one event differ by at most 39.5 µs.",
        ),
        ((0.0, -7.5), (1.0, 41.5), "The clocks of any two ranks agree to 42.5 µs."),
        ((0.0, None), (9.0, None), "The clock of rank 1 was not compared with the other clocks"),
        ((None, None), (None, None), "The clock of rank 0, 1 was not compared with the other clocks"),
    ],
)
def test_what_is_known_of_the_clocks_is_said(
    offsets: tuple[float | None, ...],
    errors: tuple[float | None, ...],
    said: str,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A part that was cut before its clock was looked at is not said to have that of the others."""
    found = json.loads(trace.read_text())
    for one, offset, error in zip(found["metadata"]["ranks"], offsets, errors):
        one.update(clock_offset_us=offset, clock_error_us=error)
    trace.write_text(json.dumps(found))
    assert main(["timeline", "summary", str(trace)]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert out.count("clock") == said.count("clock"), "one thing is said of them"


def test_what_comes_before_replay_makes_no_straggler(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks do not start at the same moment: a first bucket that waits a second says nothing of the steps."""
    found = json.loads(trace.read_text())
    for pid, ready_us in ((0, 1000.0), (1, 0.0)):
        args = {
            "bucket": "d0",
            "set": 0,
            "tensors": 1,
            "nbytes": 4,
            "names": ["w"],
            "ready_us": [0.0],
            "entered_us": 0.0,
        }
        top = {
            "name": "BROADCAST",
            "ph": "X",
            "pid": pid,
            "tid": 11,
            "ts": ready_us * 1000 - 2e6,
            "dur": 10.0,
            "args": args,
        }
        found["traceEvents"].append(top)
    trace.write_text(json.dumps(found))
    assert main(["timeline", "summary", str(trace)]) == 0
    assert (
        "Rank 1 delays the others most: it comes last to 100% of the buckets, 3.000 ms after" in capsys.readouterr().out
    )


class Tags(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [value for name, value in attributes if name in ("src", "href") and value]


def test_the_page_needs_nothing_else(trace: Path, tmp_path: Path) -> None:
    """Charts as SVG within it, no script, nothing loaded from elsewhere; names are text, whatever they hold."""
    page = tmp_path / "t.html"
    assert main(["timeline", "summary", str(trace), "--html", str(page)]) == 0
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.seen.count("figure") == 3 and tags.seen.count("table") == 3 and "svg" in tags.seen
    assert tags.outside == [] and "script" not in tags.seen and "b" not in tags.seen
    assert "&lt;b&gt;" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["summary", "gone.json"], "gone.json: No such file or directory"),
        (["summary", "empty.json"], "holds no bucket"),
        (["summary", "other.json"], "no trace"),
        (["summary", "numbers.json"], "numbers.json is no trace that ddl wrote"),
        (["summary", "foreign.json"], "foreign.json is no trace that ddl wrote"),
        (["merge", "gone.json"], "there are no parts in gone.json.ranks"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2."""
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text('{"traceEvents": []}')
    Path("other.json").write_text("17")
    Path("numbers.json").write_text('{"traceEvents": [1, 2]}')
    Path("foreign.json").write_text(
        '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": 1, "args": null}]}'
    )
    assert main(["timeline", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and complaint in err


def test_parts_that_were_left_are_merged_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a launcher that was killed."""
    directory = tmp_path / "t.json.ranks"
    directory.mkdir()
    (directory / "rank0.json").write_text(
        '[\n{"name":"TIMELINE","ph":"i","pid":0,"tid":2,"ts":5,"args":{"rank":0}}\n]\n'
    )
    assert main(["timeline", "merge", str(tmp_path / "t.json")]) == 0
    assert "from 1 parts" in capsys.readouterr().out
    assert [event["ts"] for event in read_trace(tmp_path / "t.json")[1]] == [0.0]


def part(path: Path, rank: int, world: int, first_us: int) -> None:
    """Write what ``rank`` records in a world: three periods of one bucket, and no end of its replay."""
    report = asdict(
        WorldReport(world, 2, lost=(LaunchedRank(1),) if world > 1 else (), still_s=0.5, text=f"world {world}")
    )
    writer = TraceWriter(rank, rank, "h", lambda set_id, kind: "shm", world=report)
    file = TraceFile(path)
    file.add(writer.begin({"rank": rank, "size": 2, "host": "h", "world": f"world{world}"}, first_us * 1000))
    ring = RingBuffer(64)
    bucket = Planned(0, Kind.ALLREDUCE, ("x",), (encode(Spec(Kind.ALLREDUCE, DType.F32, (100,))),))
    ring.put(RecordKind.REPLAY, first_us * 1000, 1, 0, (bucket,), 0)
    for place in range(3):
        begin = 1000 * (first_us + 1000 * (place + 1) + 100 * rank)
        ring.put(RecordKind.BUCKET, begin, begin + 500_000, 100, 100, place, bucket, 400)
    file.add(writer.write(list(ring.take())))
    file.close()


def test_worlds_are_kept_apart(tmp_path: Path) -> None:
    """Epochs, schedules and buckets have the same numbers in each. A rank that was killed in mid-write loses one record."""
    parts = tmp_path / "parts"
    for rank in range(2):
        part(parts / f"rank{rank}.json", rank, 1, 0)
        part(parts / f"rank{rank}.1.json", rank, 2, 1_000_000)
    whole = (parts / "rank1.json").read_bytes()
    (parts / "rank1.json").write_bytes(whole[: whole.rindex(b'"SHM_ALLREDUCE"') + 5])
    (parts / "rank1.2.json").touch()  # a process that was killed before it had written anything
    assert merge(parts_in(parts), tmp_path / "t.json") == []
    metadata, events = read_trace(tmp_path / "t.json")
    assert len(metadata["ranks"]) == 4
    runs = runs_of(events)
    assert {(run.world, run.pid): sum(one.pid == run.pid and one.world == run.world for one in runs) for run in runs} == {
        ("world1", 0): 3, ("world1", 1): 3, ("world2", 0): 3, ("world2", 1): 3,
    }  # fmt: skip
    found = summarise(metadata, events)
    assert [round(row.step_ms, 3) for row in found.ranks] == [1.0, 1.0], "no step reaches from one world into the next"
    assert [(row.last, round(row.late_ms, 3)) for row in found.ranks] == [(0, 0.0), (6, 0.1)]
    assert [(row.names, row.count) for row in found.buckets] == [("x", 12)], "the same bucket in both worlds is one row"
    assert [(one.generation, one.lost, one.still_s) for one in found.worlds] == [(1, (), 0.5), (2, (1,), 0.5)]
    replays = [(event["pid"], event["ph"]) for event in events if event["name"] == "REPLAY"]
    for rank in range(2):
        assert [phase for pid, phase in replays if pid == rank] == ["B", "E", "B"], "the last one may still be going on"


HOSTILE = ["w[/]", "[bold red]w", "w[link=x]", "\x1b]0;title\x07\x1b[2J", "half \ud800", "a\nb", "<script>", "\\[/]"]


def hostile_trace(path: Path) -> None:
    """Two ranks that reduce tensors of such names, on hosts of such names."""
    parts = path.with_name("parts")
    parts.mkdir()
    for rank in range(2):
        writer = TraceWriter(rank, rank, HOSTILE[rank], lambda set_id, kind: "shm")
        file = TraceFile(parts / f"rank{rank}.json")
        file.add(writer.begin({"rank": rank, "size": 2, "host": HOSTILE[rank], "world": 0, "ddl": HOSTILE[3]}, 0))
        ring = RingBuffer(64)
        for i, name in enumerate(HOSTILE):
            begin = 1_000_000 * (i + 1)
            ring.put(
                RecordKind.BUCKET, begin, begin + 500_000, 100, 100, -1, Bucket(i, 0, Kind.ALLREDUCE, (name,)), 400
            )
        file.add(writer.write(list(ring.take())))
        file.close()
    assert merge(parts_in(parts), path) == []


@pytest.mark.parametrize("on_terminal", [True, False])
def test_any_name_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    """As it is, not as markup; what would move a cursor, or is no text, as a backslash escape. On the page and as JSON, too."""
    trace, target = tmp_path / "t.json", tmp_path / "t.html"
    hostile_trace(trace)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    assert main(["timeline", "summary", str(trace), "--html", str(target)]) == 0
    shown = capsys.readouterr().out
    for name in HOSTILE:
        assert plain(name) in shown, name
    assert "\x1b]0" not in shown
    page = target.read_text(encoding="utf-8")
    assert "half \\ud800" in page and "<script>" not in page
    assert main(["timeline", "summary", str(trace), "--json"]) == 0
    names = {row["names"] for row in json.loads(capsys.readouterr().out)["buckets"]}
    assert set(HOSTILE) <= names


def test_what_is_plain_stays() -> None:
    """Letters of any language, spaces; only what no terminal shows is escaped."""
    assert plain("weight über 重み [0]") == "weight über 重み [0]"
    assert plain("a\x1b[2J\ud800\n") == "a\\x1b[2J\\ud800\\n"


def test_a_report_of_the_doctor_shows_any_name() -> None:
    """Hosts and checks are text, not markup."""
    import io

    from ddl_doctor.doctor.drawn import print_report
    from ddl_doctor.doctor.report import DoctorReport
    from rich.console import Console

    from ddlcore.contracts.check import Matrix

    report = DoctorReport(title="[/]")
    report.matrices.append(Matrix("t[/]", "us", ("h[/]", "[red]h"), ((None, 1.0), (1.0, None))))
    sink = io.StringIO()
    print_report(report, Console(file=sink, width=200))
    assert "h[/]" in sink.getvalue() and "[red]h" in sink.getvalue()


# --- whose directory it is


def gathering(file: Path | str) -> Gathering:
    """Return that of a job of two ranks, with --timeline ``file``."""
    settings, _ = settings_of({}, {"timeline": str(file)}, warns=False)
    Gathering.check(settings)
    return Gathering(WatchedJob(settings, "a job", ("here", "here", "")))


def test_a_directory_that_ddl_did_not_make_stays(tmp_path: Path) -> None:
    """Where the parts would stand is somebody's directory: the job does not begin, and every file of it is there."""
    theirs = tmp_path / "t.json.ranks"
    theirs.mkdir()
    (theirs / "rank0.json").write_text("precious")
    with pytest.raises(ValueError, match=r"t\.json\.ranks, which holds what ddl did not write; move that away"):
        gathering(tmp_path / "t.json")
    assert (theirs / "rank0.json").read_text() == "precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """To a directory that ddl did make elsewhere: nothing in it is removed."""
    make_directory(tmp_path / "real")
    (tmp_path / "real" / "rank0.json").write_text("precious")
    (tmp_path / "t.json.ranks").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="which holds what ddl did not write"):
        gathering(tmp_path / "t.json")
    assert (tmp_path / "real" / "rank0.json").read_text() == "precious"


def test_what_is_put_among_the_parts_stays(tmp_path: Path) -> None:
    """The parts go, a file of somebody's does not, nor the directory that it is in."""
    one = gathering(tmp_path / "t.json")
    assert one.timeline_dir is not None
    for name in ("rank0.json", "rank1.2.json", "notes.txt", "rank_of_mine.json"):
        (one.timeline_dir / name).write_text("[]")
    one.close()
    assert {path.name for path in one.timeline_dir.iterdir()} >= {"notes.txt", "rank_of_mine.json"}
    assert not (one.timeline_dir / "rank0.json").exists()


def test_what_an_earlier_job_has_left_is_taken_away(tmp_path: Path) -> None:
    """Its parts are ours; an empty directory that was there stays."""
    first = gathering(tmp_path / "t.json")
    assert first.timeline_dir is not None
    (first.timeline_dir / "rank0.json").write_text("[]")
    again = gathering(tmp_path / "t.json")
    assert again.timeline_dir is not None and parts_in(again.timeline_dir) == []
    again.close()
    assert not again.timeline_dir.exists()
    again.timeline_dir.mkdir()
    third = gathering(tmp_path / "t.json")
    assert third.timeline_dir is not None
    third.close()
    assert third.timeline_dir.is_dir()


@pytest.mark.parametrize("told", [True, False])
def test_parts_that_could_not_be_merged_stay(tmp_path: Path, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of ranks that were started: nothing that they have written is lost by an error, or by an interrupt before that."""
    one = gathering(tmp_path / "t.json")
    assert one.timeline_dir is not None
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    part(one.timeline_dir / "rank0.json", 0, 1, 0)
    if told:
        said: list[str] = []
        (tmp_path / "t.json").mkdir()  # nothing can be written there
        one.finished(said.append)
        assert said == [f"timeline {tmp_path / 't.json'}: Is a directory; the ranks' parts are in {one.timeline_dir}"]
    one.close()
    assert [path.name for path in parts_in(one.timeline_dir)] == ["rank0.json"]
    assert (f"the ranks' parts are in {one.timeline_dir}; `ddl timeline merge`" in caplog.text) is not told


def test_no_parts_have_two_reasons(tmp_path: Path) -> None:
    """Nobody has recorded: no rank has begun, or none has the package."""
    said: list[str] = []
    one = gathering(tmp_path / "t.json")
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    one.finished(said.append)
    one.close()
    assert said == ["no timeline was written: no rank has called init(), or ddl-doctor is off on their hosts"]
    assert list(tmp_path.iterdir()) == []


def test_the_ranks_that_have_recorded_are_counted(tmp_path: Path) -> None:
    """Of those that were started at first, not of the places that an elastic job may take later."""
    said: list[str] = []
    one = gathering(tmp_path / "t.json")
    assert one.timeline_dir is not None
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    part(one.timeline_dir / "rank1.json", 1, 1, 0)
    part(one.timeline_dir / "rank1.1.json", 1, 2, 0)
    one.finished(said.append)
    one.close()
    (line,) = said
    assert line.startswith(f"timeline of 1 ranks out of 2 in {tmp_path / 't.json'};")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_dynamic_timeline_is_started_by_the_script_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Horovod: the launcher makes no directory, and has nothing to say in the end."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    one = gathering("Dynamic")
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    one.finished(said.append)
    one.close()
    assert one.timeline_dir is None and said == [] and list(tmp_path.iterdir()) == []
