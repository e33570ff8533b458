"""What the user is told about the worlds of an elastic job, from the messages and ends that the launcher sees."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddlcore.config.table import CHILD_MARK
from ddlcore.launch.job.history import History
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.elastic import NextWorld, Register, WorldReport
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_rank import Welcome

KILL = -int(signal.SIGKILL)
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "faults" / "elastic_chaos.py"


class Job:
    """The launcher of a job of three ranks whose first world has begun at 100 s."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.said: list[str] = []
        self.hosts: dict[int, str] = {}  # by rank
        self.history = History(self.said.append, lambda rank: self.hosts.get(rank, ""), lambda: self.now_s)
        self.begin(1, 0, 1, 2)

    def register(self, rank: int, generation: int, steps: int, again: int = 0, reason: str = "") -> None:
        self.history.heard(rank, Register(PROTOCOL, "1", generation, steps, reason, again))

    def announce(self, generation: int, *members: int) -> None:
        self.history.told(NextWorld(generation, members, (0,) * 4, members[0], 3))

    def begin(self, generation: int, *members: int) -> WorldReport:
        self.announce(generation, *members)
        sent = self.history.told(Welcome("world", WorldReport(generation, len(members))))
        assert isinstance(sent, Welcome) and sent.session == "world" and sent.report is not None
        assert self.history.told(Welcome("world")) == sent, "all members get the same"
        return sent.report

    def kill(self, rank: int, at_s: float) -> None:
        self.history.ended(End(rank, KILL, at_s))


def test_nothing_is_said_of_a_job_without_events() -> None:
    job = Job()
    for rank in range(3):
        job.history.ended(End(rank, 0, 120.0))
    job.now_s = 121.0
    assert job.said == []
    assert job.history.status().endswith("stood still for 0.00 s"), "the ranks have ended as they should"
    assert job.history.summary() == ""


def test_a_loss_and_a_return() -> None:
    """One line for each world; the newest step of its members; the time from the first sign to the beginning."""
    job = Job()
    job.kill(2, 110.0)
    job.register(0, 1, 40, 1, "rank 2 lost")
    job.register(1, 1, 39, 1, "rank 2 lost")
    job.now_s = 110.25
    second = job.begin(2, 0, 1)
    job.now_s = 114.0
    job.register(2, 0, -1)  # it waits, and nobody stands still for it
    job.now_s = 114.5
    job.register(0, 2, 90)
    job.register(1, 2, 90)
    job.now_s = 114.6
    third = job.begin(3, 0, 1, 2)
    assert job.said == [
        "world 2: rank 2 died (SIGKILL); 2 ranks go on; step 41 is computed again; they stood still for 0.25 s",
        "world 3: rank 2 is back 4.6 s after the loss; 3 ranks go on after step 90; they stood still for 0.10 s",
    ]
    assert second == WorldReport(2, 2, (2,), (), (), 1, 0.25, 1, 0, 0.25, job.said[0])
    assert (third.lost, third.joined, third.left, third.recomputed) == ((), (2,), (), 0)
    assert (third.ranks_lost, third.ranks_joined) == (1, 1)
    assert [third.still_s, third.seconds_lost] == pytest.approx([0.1, 0.35])
    job.now_s = 120.0
    assert job.history.summary().splitlines() == [
        "the job had 3 worlds (ranks lost: 1, joined: 1); the training stood still for 0.35 s of 20.0 s",
        f"  10.2 s  {job.said[0]}",
        f"  14.6 s  {job.said[1]}",
    ]


def test_the_status_counts_also_the_time_that_has_not_ended() -> None:
    job = Job()
    assert History(job.said.append).status() == ""
    assert job.history.status() == "world 1: 3 ranks; ranks lost: 0, joined: 0; stood still for 0.00 s"
    job.kill(2, 110.0)
    job.now_s = 110.5
    assert job.history.status() == "world 1: 3 ranks; ranks lost: 1, joined: 0; stood still for 0.50 s"
    job.begin(2, 0, 1)
    job.now_s = 115.0
    assert job.history.status() == "world 2: 2 ranks; ranks lost: 1, joined: 0; stood still for 0.50 s"


def test_a_world_that_is_lost_before_it_begins_is_not_told() -> None:
    """The line of the world after it names both ranks that were lost, and all of the time."""
    job = Job()
    job.kill(2, 110.0)
    job.announce(2, 0, 1)
    job.kill(1, 111.0)
    job.now_s = 112.0
    job.begin(3, 0)
    assert job.said == ["world 3: ranks 1-2 died (SIGKILL); 1 rank goes on; it stood still for 2.00 s"]


def test_a_rank_that_is_back_before_the_next_world_begins() -> None:
    job = Job()
    job.kill(1, 110.0)
    job.now_s = 113.0
    job.begin(2, 0, 1, 2)
    assert job.said == ["world 2: rank 1 is back 3.0 s after the loss; 3 ranks go on; they stood still for 3.00 s"]


def test_hosts_are_named_where_there_are_several() -> None:
    """A lost rank with the host on which it ran, a rank that is back with its new one."""
    job = Job()
    job.hosts = {0: "node1", 1: "node1", 2: "node2", 3: "node3"}
    job.kill(1, 100.0)
    job.kill(2, 100.0)
    job.hosts[1] = "node3"
    job.begin(2, 0)
    job.begin(3, 0, 1, 3)
    assert job.said[0].startswith("world 2: rank 1 on node1 and rank 2 on node2 died (SIGKILL); 1 rank goes on;")
    assert job.said[1].startswith(
        "world 3: rank 1 on node3 is back 0.0 s after the loss; rank 3 on node3 has joined; 3"
    )


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (End(1, -11, 1.0), "died (SIGSEGV)"),
        (End(1, -40, 1.0), "died (signal 40)"),
        (End(1, 3, 1.0), "died (exit code 3)"),
        (End(1, KILL, 1.0, silent="others waited 8.0 s for it"), "died (SIGKILL by the launcher)"),
        (End(1, 255, 1.0, lost="its host node2 is gone (no word)"), "was lost (its host node2 is gone (no word))"),
    ],
)  # fmt: skip
def test_the_cause_of_a_loss_is_told(end: End, how: str) -> None:
    job = Job()
    job.history.ended(end)
    assert job.begin(2, 0, 2).text.startswith(f"world 2: rank 1 {how}; 2 ranks go on; ")


def test_ranks_that_fail_in_different_ways_and_one_that_leaves() -> None:
    job = Job()
    job.kill(1, 110.0)
    job.history.ended(End(2, 1, 110.0))
    job.begin(2, 0)
    assert job.said[-1].startswith("world 2: rank 1 died (SIGKILL); rank 2 died (exit code 1); 1 rank goes on;")
    assert job.begin(3, 0, 1, 2).ranks_joined == 2
    report = job.begin(4, 0, 1)
    assert report.text.startswith("world 4: rank 2 has left; 2 ranks go on;")
    assert (report.left, report.lost, report.ranks_lost) == ((2,), (), 2)


def test_all_steps_that_are_computed_again_are_told() -> None:
    """With rollback to a commit. What a rank is behind does not count: it takes that over from the others."""
    job = Job()
    job.kill(2, 110.0)
    job.register(0, 1, 40, 3, "rank 2 lost")
    job.register(1, 1, 40, 2, "rank 2 lost")
    report = job.begin(2, 0, 1)
    assert report.recomputed == 3 and "; steps 41-43 are computed again;" in report.text
    job.kill(1, 120.0)
    job.register(0, 2, 51, 0, "rank 1 lost")
    report = job.begin(3, 0)
    assert report.recomputed == 0 and "1 rank goes on after step 51;" in report.text


def test_a_world_that_follows_without_a_loss_names_who_has_left_the_last_one() -> None:
    job = Job()
    job.register(1, 1, 40, 1, "the link to rank 0 is broken")
    job.register(0, 1, 40, 1, "rank 1 lost")
    text = job.begin(2, 0, 1, 2).text
    assert text.startswith(
        "world 2: rank 1 has left the last one (the link to rank 0 is broken); 3 ranks go on; step 41 "
    )


def test_a_long_history_shows_its_end() -> None:
    job = Job()
    for number in range(2, 15):
        job.begin(number, 0, 1, 2)
    lines = job.history.summary().splitlines()
    assert lines[1] == "  3 earlier changes are left out"
    assert len(lines) == 12
    assert "world 14: " in lines[-1]


@pytest.mark.processes
@pytest.mark.long
def test_an_elastic_job_tells_its_history(tmp_path: Path) -> None:
    """A rank of three is killed: the others go on, it comes back, and each of that is said once, and in the summary.

    The live page lists the same, and the row of the rank lives again.
    """
    folder, output = tmp_path / "pids", tmp_path / "output"
    folder.mkdir()
    environ = {**os.environ, "STEPS": "200", "FOLDER": str(folder), "PAUSE_S": "0.005", "PATIENCE_S": "60"}
    environ.pop(CHILD_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "ddlcore.launch",
        "run",
        "-np",
        "3",
        "--min-np",
        "2",
        "--dashboard",
        str(free_port()),
    ]
    command += [sys.executable, str(PROGRAM)]
    with open(output, "w") as file:
        job = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    try:
        wait_for(lambda: len(list(folder.iterdir())) == 3, "the first world", job, output)
        os.kill(max(int(entry.name) for entry in folder.iterdir()), signal.SIGKILL)
        wait_for(lambda: "world 3: " in output.read_text(), "the rank to come back", job, output)
        page = output.read_text().partition("live page: ")[2].split()[0]
        # The page shows a state that is up to a second old.
        wait_for(
            lambda: [rank["state"] for rank in shown(page)["ranks"]] == ["running"] * 3, "all rows to live", job, output
        )
        now = shown(page)
        told = [event["text"] for event in now["events"] if event["text"].startswith("world ")]
        assert [text.partition(":")[0] for text in told] == ["world 2", "world 3"]
        world = now["world"]
        assert world.pop("seconds_lost") > 0
        assert world == {"generation": 3, "size": 3, "ranks_lost": 1, "ranks_joined": 1}
        (folder / "enough").touch()
        assert job.wait(60.0) == 0
    finally:
        job.kill()
        job.wait()
    said, _, summary = output.read_text().partition("ddl run: the job had 3 worlds (ranks lost: 1, joined: 1); ")
    for lines in (said, summary):
        assert lines.count(" died (SIGKILL); 2 ranks go on") == 1, lines
        assert lines.count(" is back ") == lines.count("3 ranks go on after step ") == 1, lines


def free_port() -> int:
    """Return a port that is free, most likely still when it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shown(url: str) -> dict[str, Any]:
    """Return the state of the job that a live page would show now."""
    with urllib.request.urlopen(f"{url}stream", timeout=10.0) as stream:
        while not (line := stream.readline()).startswith(b"data:"):
            assert line, "the page has ended"
    now: dict[str, Any] = json.loads(line[5:])["now"]
    return now


def wait_for(condition: Callable[[], bool], what: str, job: subprocess.Popen[bytes], output: Path) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert job.poll() is None and time.monotonic() < until_s, f"{what}\n{output.read_text()}"
        time.sleep(0.05)
