"""Elastic jobs on several hosts: ranks that an agent runs are started again there, and whole hosts are lost.

The hosts are this machine under other names: a stand-in for ssh starts their agents here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import worlds_of

from ddlcore.config.table import CHILD_MARK
from tests.launch.standin import STAND_IN_WORKS, install_ssh

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("elastic_chaos.py")
pytestmark = [pytest.mark.processes, STAND_IN_WORKS]


class Job:
    """An elastic job that trains until ``enough`` is called. Its ranks run on hosts whose names do not matter."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "pids"
        self.folder.mkdir()
        environ = {**os.environ, **install_ssh(folder / "bin"), "STEPS": "300", "FOLDER": str(self.folder)}
        environ.pop(CHILD_MARK, None)
        environ |= {"PAUSE_S": "0.005", "PATIENCE_S": "60", "THIS_JOB": str(folder)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        run = [sys.executable, "-m", "ddlcore.launch", "run", *options, sys.executable, str(PROGRAM)]
        self.output = folder / "output"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(run, env=environ, stdout=output, stderr=output)
        self._mark = f"THIS_JOB={folder}".encode()

    def until(self, condition: Callable[[], bool], what: str, *, after_the_end: bool = False) -> None:
        """Wait until ``condition()`` is true, at most 40 s. Fail at once if the job ends before it may."""
        until_s = time.monotonic() + 40.0
        while not condition():
            over = self.process.poll() is not None and not after_the_end
            assert not over and time.monotonic() < until_s, f"{what}\n{self.text()}"
            time.sleep(0.02)

    def pids(self, words: bytes, variable: bytes = b"") -> list[int]:
        """Return the processes of this job whose command line has ``words``, and whose environment has ``variable``."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if self._mark in environ and (not variable or variable in environ) and words in command:
                found.append(int(entry.name))
        return found

    def of_rank(self, rank: int) -> list[int]:
        return self.pids(b"elastic_chaos", b"DDL_RANK=%d" % rank)

    def trains(self, rank: int, before: Sequence[int] = ()) -> bool:
        """Return whether a process of ``rank`` is in a world. The processes in ``before`` are not counted."""
        return any((self.folder / str(pid)).exists() for pid in self.of_rank(rank) if pid not in before)

    def agents(self) -> list[int]:
        return [pid for pid in self.pids(b"agents.agent import main") if not self._is_shell(pid)]

    def _is_shell(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return not Path(f"/proc/{pid}/comm").read_text().startswith("python")
        return True

    def kill(self, pids: list[int]) -> None:
        assert pids, self.text()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended with one of the others
                os.kill(pid, signal.SIGKILL)
        self.until(lambda: not set(pids) & set(self.pids(b"")), "killed")

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> list[str]:
        """Let the training end, check that all ranks have the right result, and return the lines of the results."""
        (self.folder / "enough").touch()
        assert self.process.wait(60.0) == 0, self.text()
        results = [line for line in self.text().splitlines() if "right " in line]
        assert results and all("right True once True" in line for line in results), self.text()
        self.until(lambda: not self.pids(b""), "no process is left", after_the_end=True)
        return results


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(*options: str) -> Job:
        jobs.append(Job(tmp_path, *options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait(10.0)


@pytest.mark.long
def test_a_rank_of_another_host_is_started_again_there(start: Start, tmp_path: Path) -> None:
    """Twice: the second time after a delay. The ranks that live go on with the same processes.

    The timeline has the records of all three processes of that rank.
    """
    trace = tmp_path / "t.json"
    options = "--min-np", "1", "--restart-delay-s", "0.1", "--backend", "auto", "--timeline", str(trace)
    job = start("-H", "localhost:1,other:2", *options)
    job.until(lambda: all(job.trains(rank) for rank in range(3)), "all ranks train")
    stay = job.of_rank(0) + job.of_rank(1)
    for _ in range(2):
        job.kill(job.of_rank(2))
        job.until(lambda: job.trains(2), "rank 2 is back")
    assert job.of_rank(0) + job.of_rank(1) == stay
    assert len(job.end()) == 3
    assert "rank 2 killed by signal 9 (SIGKILL); it is started again\n" in job.text()
    assert "rank 2 killed by signal 9 (SIGKILL); it is started again in 0.1 s" in job.text()
    assert ": rank 2 on other " in job.text()
    metadata, events = read_trace(trace)
    worlds = worlds_of(events)
    assert [one.generation for one in worlds] in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]), (
        "5, unless it is back at once"
    )
    assert sum(one.lost == (2,) for one in worlds) == sum(one.joined == (2,) for one in worlds) == 2
    assert [one["complete"] for one in metadata["ranks"] if one["pid"] == 2] == [False, False, True]
    assert len(metadata["ranks"]) == sum(one.size for one in worlds)


@pytest.mark.slow("of elastic jobs on several hosts, `make test` has this one")
def test_a_host_is_lost(start: Start) -> None:
    """Its agent dies, and its ranks with it. The others go on, and the job has succeeded."""
    job = start("-H", "localhost:2,other:2", "--min-np", "2")
    job.until(lambda: all(job.trains(rank) for rank in range(4)), "all ranks train")
    stay = job.of_rank(0) + job.of_rank(1)
    job.kill(job.agents())
    job.until(lambda: not job.of_rank(2) + job.of_rank(3), "the ranks of the lost host have ended")
    assert job.of_rank(0) + job.of_rank(1) == stay
    assert len(job.end()) == 2
    assert "rank 2: its host other is gone" in job.text()


@pytest.mark.long
def test_spare_slots_take_the_place_of_a_lost_host(start: Start) -> None:
    """Hosts that -H names beyond -np are called when they are needed."""
    job = start("-np", "3", "-H", "localhost:1,other:2,spare:2", "--min-np", "1")
    job.until(lambda: all(job.trains(rank) for rank in range(3)), "all ranks train")
    stay = job.of_rank(0)
    (agent,) = job.agents()
    job.kill([agent])
    job.until(lambda: job.trains(1) and job.trains(2) and job.agents() not in ([], [agent]), "they are back elsewhere")
    assert job.of_rank(0) == stay
    assert len(job.end()) == 3
    assert "rank 1 is started on spare" in job.text() and "rank 2 is started on spare" in job.text()


@pytest.mark.long
def test_a_lost_host_comes_back(start: Start) -> None:
    """After its cool-down it is called again."""
    job = start("-H", "localhost:1,other:1", "--min-np", "1", "--host-cooldown-s", "0.5 2")
    job.until(lambda: job.trains(0) and job.trains(1), "all ranks train")
    before = job.of_rank(1)
    job.kill(job.agents())
    job.until(lambda: job.trains(1, before), "rank 1 is back")
    assert len(job.end()) == 2
    assert "rank 1: its host other is gone" in job.text()
    assert "it is started again when a host has room for it" in job.text()


@pytest.mark.long
def test_growing_and_shrinking_by_a_script(start: Start, tmp_path: Path) -> None:
    """From 2 to 4 on one host, to another host, and back to 2: the first processes are never started again."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    script = ["--host-discovery-script", f"cat {hosts}"]
    job = start("-np", "2", "--min-np", "1", "--max-np", "4", *script)
    job.until(lambda: job.trains(0) and job.trains(1), "the first ranks train")
    stay = job.of_rank(0) + job.of_rank(1)
    hosts.write_text("localhost:4\n")
    job.until(lambda: job.trains(2) and job.trains(3), "two more train")
    local = job.of_rank(2) + job.of_rank(3)
    hosts.write_text("localhost:2\nother:2\n")
    job.until(lambda: not set(local) & set(job.pids(b"")), "left")
    job.until(lambda: len([rank for rank in range(8) if job.trains(rank)]) == 4, "two train on the other host")
    hosts.write_text("localhost:2\n")
    job.until(lambda: len([rank for rank in range(8) if job.of_rank(rank)]) == 2, "they have left")
    assert job.of_rank(0) + job.of_rank(1) == stay
    assert len(job.end()) == 2
    text = job.text()
    assert "localhost takes no more than 2 now: ranks 2-3 will leave the training" in text
    assert "other leaves the job: ranks " in text and "killed" not in text


@pytest.mark.long
def test_a_host_is_told_to_leave(start: Start) -> None:
    """SIGTERM to its agent: its ranks leave at the next commit, and nothing is computed twice."""
    job = start("-H", "localhost:1,other:2", "--min-np", "1")
    job.until(lambda: all(job.trains(rank) for rank in range(3)), "all ranks train")
    (agent,) = job.agents()
    os.kill(agent, signal.SIGTERM)
    job.until(lambda: not job.of_rank(1) + job.of_rank(2), "its ranks have left")
    assert len(job.end()) == 1
    assert "other leaves the job: ranks 1-2 will leave the training" in job.text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host-discovery-script", "echo a b c"], "'a b c' is not of the form HOST or HOST:SLOTS"),
        (["--host-discovery-script", "echo no >&2; exit 3"], "ended with code 3: no"),
        (["--host-discovery-script", "echo localhost", "-H", "localhost:1"], "-H and host discovery both say where"),
        (["--host-discovery", "slurm"], "this is no Slurm job"),
        (["--host-discovery", "scirpt"], "did you mean"),
        (
            ["--host-discovery-script", "echo localhost", "--start-timeout-s", "0.1", "--min-np", "3"],
            "has found 1 slots",
        ),
        (["-np", "1", "--host-cooldown-s", "ten"], "give two numbers of seconds"),
        (["-np", "2", "--max-np", "1"], "--max-np 1 is less than the 2 ranks of the job"),
    ],
)
def test_what_cannot_be_done(options: list[str], words: str) -> None:
    given = [] if "--min-np" in options else ["--min-np", "1"]
    run = [sys.executable, "-m", "ddlcore.launch", "run", *given, *options, "python", "-c", "1"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60.0)
    assert done.returncode != 0 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.long
def test_they_need_an_elastic_job() -> None:
    for option in (["--max-np", "3"], ["--host-discovery-script", "echo localhost"]):
        run = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "1", *option, "python", "-c", "1"]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60.0)
        assert done.returncode != 0 and "add --min-np N" in done.stderr, done.stderr
