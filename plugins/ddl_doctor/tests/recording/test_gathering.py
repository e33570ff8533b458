"""Test ``ddl run --timeline``: the ranks' parts of all hosts become one trace, also if ranks were killed."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest
from ddl_doctor.recording.gathering import Gathering
from ddl_doctor.recording.part_writer import make_directory
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import runs_of, worlds_of

from ddlcore.commands.cli import main
from ddlcore.launch.job.watch import RunningRanks, WatchedJob
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.plug.settings import settings_of
from plugins.ddl_doctor.tests.recording.agreement import ends_apart
from plugins.ddl_doctor.tests.recording.written import part
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


# --- whose directory it is


def gathering(file: Path | str) -> Gathering:
    """Return the Gathering of a job of two ranks with ``--timeline FILE``."""
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
    """The parts of started ranks stay if the merge fails, or if an interrupt comes before the merge."""
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
    """If there are no parts, the message names both possible reasons."""
    said: list[str] = []
    one = gathering(tmp_path / "t.json")
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    one.finished(said.append)
    one.close()
    assert said == ["no timeline was written: no rank has called init(), or ddl-doctor is off on their hosts"]
    assert list(tmp_path.iterdir()) == []


def test_the_ranks_that_have_recorded_are_counted(tmp_path: Path) -> None:
    """The message counts the ranks that were started at first, and not the places that an elastic job may fill later."""
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
    """As in Horovod, the launcher then makes no directory and shows no message at the end."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    one = gathering("Dynamic")
    one.begin(RunningRanks(lambda: None, lambda rank: "here", str))
    one.finished(said.append)
    one.close()
    assert one.timeline_dir is None and said == [] and list(tmp_path.iterdir()) == []
