"""The recorder of one rank, where some ranks have none: the package is not on their hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddl_conform.store import ThreadStore
from ddl_doctor.recording import exchange, recorder
from ddl_doctor.recording.recorder import TimelineRecorder
from ddl_doctor.timeline.reading import read_trace

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
    """The first rank has no recorder: the others keep what they have written, and say where."""
    monkeypatch.setattr(recorder, "BEGIN_S", 0.05)
    one = recorder_of(1, ThreadStore(), hosts)
    one.begin(tmp_path / "t.json", False, None, "w1", None)
    one.end(10.0)
    part = tmp_path / "t.json.ranks" / "rank1.json"
    assert part.stat().st_size > 0
    assert f"rank 0 does not collect it, so this rank's part stays in {part}" in caplog.text


def test_a_rank_that_records_nothing_is_told_from_one_that_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three, the first waits no longer than it may, and merges what there is."""
    monkeypatch.setattr(exchange, "BEGIN_S", 0.05)
    store = ThreadStore()
    first, second = (recorder_of(rank, store, (0, 0, 0)) for rank in (0, 1))
    for one in (first, second):
        one.begin(tmp_path / "t.json", False, None, "w1", None)
    first.end(0.1)
    assert "rank 1 had not stopped it within 0.1 s" in caplog.text
    assert (
        "rank 2 has not begun it: it has not called start_timeline(), or ddl-doctor is not installed there"
        in caplog.text
    )
    assert [row["rank"] for row in read_trace(tmp_path / "t.json")[0]["ranks"]] == [0, 1]
    caplog.clear()
    second.end(10.0)
    assert "rank 0 does not collect it" in caplog.text


def test_a_part_of_another_host_is_sent_and_removed_there(tmp_path: Path) -> None:
    """As before: the first rank gets the bytes through the store."""
    store = ThreadStore()
    there, here = tmp_path / "there", tmp_path / "here"
    first, other = (recorder_of(rank, store, (0, 1)) for rank in (0, 1))
    first.begin(here / "t.json", False, None, "w1", None)
    other.begin(there / "t.json", False, None, "w1", None)
    other.end(10.0)
    assert list(there.iterdir()) == []
    first.end(10.0)
    assert [row["rank"] for row in read_trace(here / "t.json")[0]["ranks"]] == [0, 1]
    assert [path.name for path in here.iterdir()] == ["t.json"]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_parts_of_an_earlier_job_are_left_out(
    hosts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that nobody had collected stays where it is, and the next trace of the same name does not have it."""
    monkeypatch.setattr(recorder, "BEGIN_S", 0.05)
    file = tmp_path / "t.json"
    alone = recorder_of(1, ThreadStore(), hosts)
    alone.begin(file, False, None, "an earlier world", None)
    alone.end(10.0)
    store = ThreadStore()
    first, other = (recorder_of(rank, store, hosts) for rank in (0, 1))
    for one in (first, other):
        one.begin(file, False, None, "w2", None)
    other.end(10.0)
    first.end(10.0)
    assert [(row["rank"], row["world"]) for row in read_trace(file)[0]["ranks"]] == [(0, "w2"), (1, "w2")]
    assert [path.name for path in parts_in(tmp_path / "t.json.ranks")] == ["rank1.json"]
