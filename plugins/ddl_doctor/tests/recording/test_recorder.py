"""Test how the recorders of several ranks bring the parts of a timeline together, without a launcher of ddl."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from ddl_conform.store import ThreadStore
from ddl_doctor.recording import exchange, recorder
from ddl_doctor.recording.recorder import TimelineRecorder
from ddl_doctor.timeline.reading import read_trace

from ddlcore.errors import DdlInternalError, DeadlineExceeded
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.observe.clock import Reading, boot_id
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.recorder import RecordedRank
from ddlcore.types import Placement

SETS: Any = None  # nothing is reduced


def recorder_of(rank: int, store: ThreadStore, hosts: tuple[int, ...]) -> TimelineRecorder:
    """Return the recorder of one rank of a world without a launcher."""
    ranks = tuple(map(LaunchedRank, range(len(hosts))))
    clock = lambda: Reading(0, boot_id())  # noqa: E731
    return TimelineRecorder(RecordedRank(SETS, Meter(), store, clock, Placement(rank, hosts), ranks, {}))


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_a_part_that_nobody_collects_stays(
    hosts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the first rank has no recorder, the other ranks keep their files, and a warning names each file."""
    monkeypatch.setattr(recorder, "BEGIN_S", 0.05)
    one = recorder_of(1, ThreadStore(), hosts)
    one.begin(tmp_path / "t.json", False, None, "w1", None)
    one.end(10.0, False)
    part = tmp_path / "t.json.ranks" / "rank1.json"
    assert part.stat().st_size > 0
    assert f"rank 0 could not be told of this rank's part, {part}" in caplog.text


def test_a_rank_that_records_nothing_is_told_from_one_that_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of three ranks waits no longer than it may, names both kinds of ranks, and merges the parts that exist."""
    monkeypatch.setattr(exchange, "BEGIN_S", 0.05)
    store = ThreadStore()
    first, second = (recorder_of(rank, store, (0, 0, 0)) for rank in (0, 1))
    for one in (first, second):
        one.begin(tmp_path / "t.json", False, None, "w1", None)
    first.end(0.1, False)
    assert "rank 1 had not stopped it within 0.1 s" in caplog.text
    assert (
        "rank 2 has not begun it: it has not called start_timeline(), or ddl-doctor is not installed there"
        in caplog.text
    )
    assert [row["rank"] for row in read_trace(tmp_path / "t.json")[0]["ranks"]] == [0, 1]
    caplog.clear()
    second.end(10.0, False)
    assert "rank 0 could not be told of this rank's part" in caplog.text


def test_a_part_of_another_host_is_removed_there_when_it_is_taken(tmp_path: Path) -> None:
    """The first rank gets the bytes through the store and says so. The other rank removes its file only after that."""
    store = ThreadStore()
    there, here = tmp_path / "there", tmp_path / "here"
    first, other = (recorder_of(rank, store, (0, 1)) for rank in (0, 1))
    first.begin(here / "t.json", False, None, "w1", None)
    other.begin(there / "t.json", False, None, "w1", None)
    other.end(10.0, False)
    part = there / "t.json.ranks" / "rank1.json"
    assert part.exists()
    first.end(10.0, False)
    assert [row["rank"] for row in read_trace(here / "t.json")[0]["ranks"]] == [0, 1]
    assert [path.name for path in here.iterdir()] == ["t.json"]
    assert part.exists()
    other.end(10.0, True)
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("fault", ["gone", "too late", "refused"])
def test_a_part_that_is_not_taken_stays_on_its_host(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The part stays if the first rank is lost, if it looked for the part too early, or if the store refuses the bytes."""
    monkeypatch.setattr(exchange, "BEGIN_S", 0.05)
    store = ThreadStore()
    first, other = (recorder_of(rank, store, (0, 1)) for rank in (0, 1))
    first.begin(tmp_path / "here.json", False, None, "w1", None)
    if fault == "too late":
        first.end(0.1, True)
    other.begin(tmp_path / "there.json", False, None, "w1", None)
    if fault == "refused":
        monkeypatch.setattr(store, "set", refused)
    other.end(0.1, True)
    assert (tmp_path / "there.json.ranks" / "rank1.json").exists()
    told = (
        "has not taken this rank's part, which stays in" if fault == "gone" else "could not be told of this rank's part"
    )
    assert told in caplog.text
    if fault != "too late":
        first.end(0.1, True)


def refused(key: str, value: bytes) -> None:
    raise DdlInternalError("too large")


def test_what_two_hosts_share_is_not_merged_twice(tmp_path: Path) -> None:
    """If both hosts see the same file system, the other rank writes its part directly into the directory of the first rank."""
    store = ThreadStore()
    first, other = (recorder_of(rank, store, (0, 1)) for rank in (0, 1))
    for one in (first, other):
        one.begin(tmp_path / "t.json", False, None, "w1", None)
    other.end(10.0, False)
    first.end(10.0, False)
    assert [row["rank"] for row in read_trace(tmp_path / "t.json")[0]["ranks"]] == [0, 1]
    other.end(10.0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_the_part_of_the_next_timeline_is_left_alone(hosts: tuple[int, ...], tmp_path: Path) -> None:
    """Rank 1 already records the next timeline, into the same file, when rank 0 merges the parts of the first timeline."""
    store = ThreadStore()
    file = tmp_path / "t.json"
    first, other = (recorder_of(rank, store, hosts) for rank in (0, 1))
    for one in (first, other):
        one.begin(file, False, None, "w1", None)
    other.end(10.0, False)
    other.begin(file, False, None, "w1", None)
    time.sleep(0.3)  # until its thread has written the first records
    first.end(10.0, False)
    assert [row["rank"] for row in read_trace(file)[0]["ranks"]] == [0, 1]
    first.begin(file, False, None, "w1", None)
    other.end(10.0, False)
    first.end(10.0, False)
    assert [(row["rank"], row["complete"]) for row in read_trace(file)[0]["ranks"]] == [(0, True), (1, True)]
    other.end(10.0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_store_that_does_not_answer_is_not_asked_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait ends soon after its deadline, however many ranks there are."""
    monkeypatch.setattr(exchange, "BEGIN_S", 0.05)
    store = ThreadStore()
    first = recorder_of(0, store, (0,) * 64)
    first.begin(tmp_path / "t.json", False, None, "w1", None)

    def late(key: str, timeout_s: float) -> bytes:
        time.sleep(0.1)
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(store, "get", late)
    begun_s = time.monotonic()
    first.end(0.1, True)
    assert time.monotonic() - begun_s < 3.0, "64 answers would take 6.4 s"
    assert "the job's store answers too late" in caplog.text


def test_a_rank_may_write_elsewhere_on_the_same_host(tmp_path: Path) -> None:
    """The first rank merges the file that the other rank has named, and not an old file of the same name beside the trace."""
    store = ThreadStore()
    first, other = (recorder_of(rank, store, (0, 0)) for rank in (0, 1))
    stale = tmp_path / "a" / "t.json.ranks" / "rank1.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("[]")
    os.utime(stale, (1, 1))
    first.begin(tmp_path / "a" / "t.json", False, None, "w1", None)
    other.begin(tmp_path / "b" / "t.json", False, None, "w1", None)
    other.end(10.0, False)
    first.end(10.0, False)
    assert [row["rank"] for row in read_trace(tmp_path / "a" / "t.json")[0]["ranks"]] == [0, 1]
    assert stale.read_text() == "[]" and list((tmp_path / "b").iterdir()) == []


def test_a_lost_store_leaves_the_parts_of_this_host_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no rank can be asked, because one has died, the new parts in the directory are merged, and they are kept."""
    store = ThreadStore()
    first, other = (recorder_of(rank, store, (0, 0)) for rank in (0, 1))
    for one in (first, other):
        one.begin(tmp_path / "t.json", False, None, "w1", None)
    other.end(0.0, False)
    monkeypatch.setattr(store, "get", lambda key, timeout_s: refused(key, b""))
    first.end(1.0, True)
    assert "not all parts could be taken: too large" in caplog.text
    assert [row["rank"] for row in read_trace(tmp_path / "t.json")[0]["ranks"]] == [0, 1]
    assert len(parts_in(tmp_path / "t.json.ranks")) == 2


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_parts_of_an_earlier_job_are_left_out(
    hosts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was never collected stays in its directory, and the next trace of the same name does not contain it."""
    monkeypatch.setattr(recorder, "BEGIN_S", 0.05)
    file = tmp_path / "t.json"
    alone = recorder_of(1, ThreadStore(), hosts)
    alone.begin(file, False, None, "an earlier world", None)
    alone.end(10.0, False)
    os.utime(tmp_path / "t.json.ranks" / "rank1.json", (1, 1))  # it ended long ago
    store = ThreadStore()
    first, other = (recorder_of(rank, store, hosts) for rank in (0, 1))
    for one in (first, other):
        one.begin(file, False, None, "w2", None)
    other.end(10.0, False)
    first.end(10.0, False)
    assert [(row["rank"], row["world"]) for row in read_trace(file)[0]["ranks"]] == [(0, "w2"), (1, "w2")]
    assert [path.name for path in parts_in(tmp_path / "t.json.ranks")] == ["rank1.json"]
