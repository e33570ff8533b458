"""Elastic jobs on hosts that are network namespaces: a host loses power, a cable is pulled, hosts are added."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch.starting import DDL, ROOT
from tools.test_cluster import TestCluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed"),
]
NewCluster = Callable[..., TestCluster]
PROGRAM = ROOT / "tests" / "faults" / "elastic_steps.py"


class Step(NamedTuple):
    """A step that a rank has applied: when, its number, the ranks that there were, and the host."""

    at_s: float
    number: int
    size: int
    host: str


class Job:
    """A training on a test cluster, with the launcher on server1."""

    def __init__(self, cluster: TestCluster, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [*DDL, "run", *options, "python", str(PROGRAM)]
        env = {"PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = cluster.popen("server1", command, cwd=folder, env=env, stdout=pipe, stderr=subprocess.STDOUT)

    def steps(self) -> list[Step]:
        """Return all steps of all ranks, in the order of time."""
        found = []
        for file in self.folder.glob("steps.*"):
            for line in file.read_text().splitlines():
                words = line.split()
                if len(words) == 4:
                    found.append(Step(float(words[0]), int(words[1]), int(words[2]), words[3]))
        return sorted(found)

    def check_steps(self) -> None:
        """No rank has applied a step twice, and somebody has applied each; who was behind has taken over the state."""
        for file in self.folder.glob("steps.*"):
            numbers = [int(line.split()[1]) for line in file.read_text().splitlines()]
            assert numbers == sorted(set(numbers)), file
        applied = {step.number for step in self.steps()}
        assert applied == set(range(1, max(applied) + 1))

    def await_size(self, size: int, since_s: float = 0.0, limit_s: float = 60.0) -> Step:
        """Return the first step after ``since_s`` that ``size`` ranks have applied; wait for it."""
        until_s = time.monotonic() + limit_s
        while True:
            for step in self.steps():
                if step.size == size and step.at_s > since_s:
                    return step
            assert time.monotonic() < until_s and self.process.poll() is None, f"no step of {size} ranks"
            time.sleep(0.1)

    def end(self) -> str:
        (self.folder / "enough").touch()
        text: str = self.process.communicate(timeout=60.0)[0]
        assert self.process.returncode == 0, text
        assert "total True" in text and "total False" not in text, text
        return text


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(cluster: TestCluster, *options: str) -> Job:
        jobs.append(Job(cluster, tmp_path, *options))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate(timeout=30.0)


def test_a_host_loses_power(new_cluster: NewCluster, start: Start) -> None:
    """No connection is closed; the others go on within 8 s, of which the most is until the silence is noticed."""
    cluster = new_cluster(4)
    hosts = ",".join(f"{name}:1" for name in cluster.names)
    job = start(cluster, "-H", hosts, "--min-np", "2")
    job.await_size(4)
    cut_s = time.time()
    cluster.kill_host("server3")
    after = job.await_size(3, cut_s)
    text = job.end()
    assert after.at_s - cut_s < 8.0, text
    assert "its host server3 is gone (no message from it for 3 s)" in text
    job.check_steps()
    assert all(cluster.leftovers(name) == [] for name in ("server1", "server2", "server4"))


def test_a_cable_is_pulled_and_plugged_in_again(new_cluster: NewCluster, start: Start) -> None:
    """The host is lost, ends its ranks, and is called again after its cool-down. There are never two trainings."""
    cluster = new_cluster(3)
    hosts = ",".join(f"{name}:1" for name in cluster.names)
    job = start(cluster, "-H", hosts, "--min-np", "1", "--host-cooldown-s", "1 4")
    job.await_size(3)
    cut_s = time.time()
    cluster.link("server3", up=False)
    job.await_size(2, cut_s)
    cluster.link("server3", up=True)
    back = job.await_size(3, time.time())
    text = job.end()
    assert "rank 2 is started on server3" in text
    alone = [step for step in job.steps() if step.host == "server3" and cut_s + 1.0 < step.at_s < back.at_s - 1.0]
    assert alone == [], "a host that is cut off does not train on"
    job.check_steps()
    assert all(cluster.leftovers(name) == [] for name in cluster.names)


def test_hosts_are_added_by_a_script(new_cluster: NewCluster, start: Start, tmp_path: Path) -> None:
    """The job begins on the launcher's host alone, and takes in another host, by its real network."""
    cluster = new_cluster(2)
    hosts = tmp_path / "hosts"
    hosts.write_text("server1:1\n")
    job = start(cluster, "--min-np", "1", "--max-np", "3", "--host-discovery-script", f"cat {hosts}")
    job.await_size(1)
    hosts.write_text("server1:1\nserver2:2\n")
    job.await_size(3)
    hosts.write_text("server1:1\n")
    job.await_size(1, job.await_size(3).at_s + 1.0)
    text = job.end()
    assert "rank 1 is started on server2" in text and "server2 leaves the job: ranks 1-2" in text
    job.check_steps()
    assert all(cluster.leftovers(name) == [] for name in cluster.names)
