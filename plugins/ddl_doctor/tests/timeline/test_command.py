"""Test ``ddl timeline``: what it says of a trace, how it merges parts, and that it can show any name."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ddl_doctor.recording.merge import merge
from ddl_doctor.recording.part_writer import TraceFile
from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddl_doctor.recording.trace_writer import TraceWriter
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import runs_of, summarise

from ddlcore.commands.cli import main
from ddlcore.messages.to_rank import Bucket
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.text.plain import plain
from ddlcore.types import Kind
from plugins.ddl_doctor.tests.recording.written import part


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
