"""What the page is told about a job, from records whose time the test decides."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from ddl_dashboard import records
from ddl_dashboard.history import KEPT_S, MOST_EVENTS, MOST_ROWS, JobHistory
from ddl_dashboard.records import Heard, JobBegin, JobEvent, Over, RankState, WorldState, decoded, encoded
from ddl_doctor.reports import Pulse

from plugins.ddl_dashboard.tests.pretend import HOSTILE, PretendJob


def trained(job: PretendJob, seconds: int, history: JobHistory | None = None, first_s: int = 1) -> JobHistory:
    """The history after so many seconds, with a pulse of each rank and a point in each."""
    if history is None:
        history = JobHistory(job.begin)
        for record in job.started():
            history.take(record, 0.0)
    for at_s in range(first_s, first_s + seconds):
        for record in job.pulses(float(at_s)):
            history.take(record, float(at_s))
        history.tick(float(at_s))
    return history


def states(history: JobHistory, now_s: float) -> list[str]:
    return [rank["state"] for rank in history.now(now_s)["ranks"]]


def test_a_job_that_trains() -> None:
    """Speed, parts of a step, links and memory are what the pulses say."""
    history = trained(PretendJob(), 20)
    now = history.now(20.0)
    assert (now["size"], now["hosts"], now["over"], now["waits"]) == (4, 2, None, [])
    summary = now["summary"]
    assert summary["steps_per_s"] == pytest.approx(20, rel=0.05)
    assert summary["step_s"] == pytest.approx(0.05, rel=0.05)
    parts = [summary[name] for name in ("compute", "exposed", "input")]
    assert parts == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    assert states(history, 20.0) == ["running"] * 4
    rank = now["ranks"][2]
    assert (rank["host"], rank["memory"], rank["gpu_memory"]) == ("node2", int(1.5 * 2**30), None)
    assert rank["cpu"] == pytest.approx(1.6)
    links = {(one["host"], one["name"]): one for one in now["links"]}
    assert set(links) == {(host, name) for host in ("node1", "node2") for name in ("shm+tcp", "eth0")}
    assert links["node1", "shm+tcp"]["sent_per_s"] == pytest.approx(2 * 20 * 40e6, rel=0.05)
    assert links["node1", "shm+tcp"]["busy"] == pytest.approx(0.15, abs=0.01)
    assert links["node2", "eth0"]["sent_per_s"] == pytest.approx(1.05 * 20 * 40e6, rel=0.05)
    assert links["node2", "eth0"]["busy"] == pytest.approx(1.1 * 20 * 40e6 * 8 / 10e9, rel=0.05)
    json.dumps(now)


def test_an_elastic_job() -> None:
    """Its present world; a rank that joins on a host of its own gets a row; a rank that moves, another host."""
    history = trained(PretendJob(), 5)
    assert history.now(5.0)["world"] is None
    history.take(WorldState(3, 5, 1, 2, 0.5), 6.0)
    history.take(RankState(5, records.INIT, host="node\x1b9"), 6.0)
    history.take(RankState(0, records.INIT, host="node2"), 6.0)
    now = history.now(6.0)
    assert now["world"] == {"generation": 3, "size": 5, "ranks_lost": 1, "ranks_joined": 2, "seconds_lost": 0.5}
    hosts = [(rank["rank"], rank["host"], rank["state"]) for rank in now["ranks"]]
    assert hosts[0] == (0, "node2", "init")
    assert hosts[4:] == [(4, "–", "ended"), (5, "node\\x1b9", "init")]
    assert now["size"] == 6
    json.dumps(now)


def test_a_rank_that_others_wait_for() -> None:
    """It is late, and they wait, with the operations that they wait for; afterwards all run again."""
    job = PretendJob()
    history = trained(job, 20)
    job.late = {1}
    history = trained(job, 3, history, 21)
    now = history.now(23.0)
    assert states(history, 23.0) == ["waiting", "late", "waiting", "waiting"]
    assert now["waits"] == [
        {"names": ["grad.fc.bias", "grad.fc.weight"], "more": 0, "ready": "0,2-3", "missing": "1", "waits_s": 3.0}
    ]
    assert now["ranks"][1]["remark"] == "others wait for it: 3 s"
    assert now["ranks"][0]["remark"] == "waits for rank 1: 3 s"
    job.late = set()
    history = trained(job, 2, history, 24)
    assert states(history, 25.0) == ["running"] * 4


def test_the_rate_falls_at_once() -> None:
    """A stall is seen in the chart within seconds, and is no part of a step."""
    job = PretendJob()
    history = trained(job, 30)
    job.late = {1}
    history = trained(job, 6, history, 31)
    assert history.now(36.0)["summary"]["steps_per_s"] == 0
    point = history.points_after(35)[0][-1]
    assert (point["rate"], point["compute"], point["exposed"]) == (0, None, None)
    job.late = set()
    history = trained(job, 8, history, 37)
    rates = [point["rate"] for point in history.points_after(36)[0]]
    assert rates == [None, *[pytest.approx(20, rel=0.1)] * 7], "the wait is no part of the steps after it"


def test_the_time_before_the_first_step_is_no_part_of_it() -> None:
    """A job may load its data for minutes between its init and its first step."""
    job = PretendJob()
    job.late = {0}
    history = trained(job, 20)
    assert history.now(20.0)["summary"]["steps_per_s"] is None
    job.late = set()
    history = trained(job, 4, history, 21)
    assert history.now(24.0)["summary"]["step_s"] == pytest.approx(0.05, rel=0.1)


def test_a_silent_rank() -> None:
    """It is told that it does not answer, and that others wait for it."""
    job = PretendJob()
    history = trained(job, 20)
    job.silent = {3}
    history = trained(job, 3, history, 21)
    assert states(history, 23.0) == ["waiting", "waiting", "waiting", "silent"]
    now = history.now(23.0)
    assert now["waits"][0]["missing"] == "3"
    assert now["ranks"][3]["remark"].startswith("nothing heard for 3 s")


def test_a_slow_rank() -> None:
    """As `ddl run --top` marks it; if it waits for much input, that is said too."""
    job = PretendJob()
    job.exposed = [0.5, 0.05, 0.5, 0.5]
    job.input = [0.02] * 4
    history = trained(job, 20)
    assert states(history, 20.0) == ["running", "slow", "running", "running"]
    assert history.now(20.0)["ranks"][1]["remark"] == "slow: computes 1.9 times as long"
    job.input = [0.02, 0.4, 0.02, 0.02]
    history = trained(job, 40, history, 21)
    waits = "slow: computes 1.9 times as long; 40% of its time it waits for input"
    assert history.now(60.0)["ranks"][1]["remark"] == waits


def test_states_of_ranks_that_do_not_run() -> None:
    """The launcher's words are shown; pulses of the past change nothing."""
    job = PretendJob()
    history = JobHistory(job.begin)
    assert states(history, 0.0) == ["starting"] * 4
    assert history.now(0.0)["summary"]["steps_per_s"] is None
    history.take(RankState(0, records.INIT), 1.0)
    history.take(RankState(1, records.ENDED, "exited with code 0"), 1.0)
    history.take(RankState(2, records.FAILED, "killed by signal 9 (SIGKILL)"), 1.0)
    history.take(RankState(9, records.FAILED), 1.0)
    assert states(history, 100.0) == ["init", "ended", "failed", "starting"]
    assert history.now(100.0)["ranks"][2]["remark"] == "killed by signal 9 (SIGKILL)"


def test_another_world_begins_anew() -> None:
    """After shutdown and init, a rank's counts begin at 0: no rate is negative, and no wait is left."""
    job = PretendJob()
    history = trained(job, 20)
    for rank in range(4):
        history.take(RankState(rank, records.INIT), 20.5)
        history.take(RankState(rank, records.RUNNING), 20.6)
    history = trained(PretendJob(), 10, history, 21)
    assert history.now(30.0)["summary"]["steps_per_s"] == pytest.approx(20, rel=0.2)


def test_the_end() -> None:
    """No point is added any more, and nobody is late."""
    job = PretendJob()
    history = trained(job, 20)
    job.late = {1}
    history = trained(job, 3, history, 21)
    history.take(Over(3, ""), 24.0)
    now = history.now(24.0)
    assert (now["over"], now["waits"]) == ({"code": 3}, [])
    assert now["events"][-1]["text"] == "the job has ended: exit code 3"
    assert "late" not in states(history, 24.0)
    assert not history.tick(100.0)


def test_memory_is_bounded() -> None:
    """A long job is remembered for 15 minutes, a large one in the ranks that differ, a chatty one in its last events."""
    history = trained(PretendJob(("n",)), KEPT_S + 50)
    points, made = history.points_after(0)
    assert (len(points), made) == (KEPT_S, KEPT_S + 50)
    assert points[0]["t"] == 51.0
    assert history.points_after(made - 3)[0] == points[-3:]
    assert history.points_after(made) == ([], made)
    for number in range(MOST_EVENTS + 50):
        history.take(JobEvent(1.0, "info", f"event {number} " + "x" * 100_000), 1.0)
    events = history.now(1.0)["events"]
    assert len(events) == MOST_EVENTS
    assert max(len(event["text"]) for event in events) <= 4000


def test_many_ranks_list_those_that_differ() -> None:
    job = PretendJob(tuple(f"node{i // 8}" for i in range(400)))
    job.exposed = [0.5] * 400
    job.exposed[333] = 0.05
    history = trained(job, 12)
    now = history.now(12.0)
    assert len(now["ranks"]) == MOST_ROWS
    listed = {rank["rank"]: rank["state"] for rank in now["ranks"]}
    assert listed[333] == "slow"
    assert now["size"] == 400
    assert len(history.points_after(0)[0][-1]["links"]) == 8


def test_hostile_texts_become_printable() -> None:
    """Control characters and those that turn the direction of writing are escaped; lines of an event stay."""
    job = PretendJob(("n\x1b[31m",) * 2, title=f"python {HOSTILE}\n", names=(HOSTILE, "\x00"))
    history = trained(job, 20)
    job.late = {1}
    history = trained(job, 3, history, 21)
    history.take(JobEvent(23.0, "warning", f"a\n{HOSTILE}\x07"), 23.0)
    now = history.now(23.0)

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for one in value.values() for text in texts(one)]
        if isinstance(value, list):
            return [text for one in value for text in texts(one)]
        return [value] if isinstance(value, str) else []

    assert all(line.isprintable() for text in texts(now) for line in text.split("\n"))
    assert now["events"][-1]["text"].count("\n") == 1
    assert any("<script>" in name for name in now["waits"][0]["names"]), "the page inserts it as text"


def test_records_are_lines() -> None:
    """Whatever is in them; a line that is none is refused."""
    for record in (
        JobBegin("a\nb", ("n",), "1", 2.0, "t", 1.0),
        Heard(3, Pulse(1.0, 2, 3.0, 4.0, 5)),
        *PretendJob().pulses(3.0),
        JobEvent(1.0, "info", "x\u2028\n"),
        Over(-1, ""),
    ):
        line = encoded(record)
        assert line.count(b"\n") == 1 and decoded(line) == record
    with pytest.raises(msgspec.DecodeError):
        decoded(b'{"type":"other"}')
