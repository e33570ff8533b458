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
    pytest.mark.long,
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

    def await_step(self, size: int, since_s: float, limit_s: float = 90.0) -> Step:
        """Return the first step after ``since_s`` that ``size`` ranks have applied, whether the launcher lives or not."""
        until_s = time.monotonic() + limit_s
        while True:
            for step in self.steps():
                if step.size == size and step.at_s > since_s:
                    return step
            assert time.monotonic() < until_s, f"no step of {size} ranks; {self.continued()}"
            time.sleep(0.1)

    def continued(self) -> str:
        """What a successor of the launcher has written; "" if there is none."""
        return "".join(file.read_text() for file in self.folder.glob("ddl-continued-*/output"))

    def end_continued(self) -> str:
        """End the training, and return what the successor has written, which must say that the job has succeeded."""
        (self.folder / "enough").touch()
        until_s = time.monotonic() + 60.0
        while not (codes := list(self.folder.glob("ddl-continued-*/exit_code"))) or not codes[0].read_text():
            assert time.monotonic() < until_s, self.continued()
            time.sleep(0.1)
        text = self.continued()
        assert codes[0].read_text() == "0\n", text
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
    left = {name: cluster.leftovers(name, 45.0) for name in cluster.names}
    assert not any(left.values()), (left, text)


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


def test_the_host_of_the_launcher_loses_power(new_cluster: NewCluster, start: Start) -> None:
    """Rank 0 is lost with it. An agent takes its place; when it is lost, too, another one does."""
    cluster = new_cluster(5)
    hosts = ",".join(f"{name}:1" for name in cluster.names)
    job = start(cluster, "-H", hosts, "--min-np", "2")
    job.await_size(5)
    time.sleep(2.0)  # the agents learn what a successor needs within a second
    cut_s = time.time()
    cluster.kill_host("server1")
    job.await_step(4, cut_s)
    time.sleep(2.0)
    again_s = time.time()
    cluster.kill_host("server2")
    job.await_step(3, again_s)
    text = job.end_continued()
    assert "this process on server2 takes the place of the launcher" in text
    assert "this process on server3 takes the place of the launcher" in text
    job.check_steps()
    assert all(cluster.leftovers(name, 45.0) == [] for name in ("server3", "server4", "server5"))


def test_a_network_is_split(new_cluster: NewCluster, start: Start) -> None:
    """The host of the launcher is cut off. It has the smaller part, and ends with an error; the others go on."""
    cluster = new_cluster(4)
    hosts = ",".join(f"{name}:1" for name in cluster.names)
    job = start(cluster, "-H", hosts, "--min-np", "1")
    job.await_size(4)
    time.sleep(2.0)
    cut_s = time.time()
    cluster.link("server1", up=False)
    text: str = job.process.communicate(timeout=60.0)[0]
    assert job.process.returncode not in (0, None), text
    assert "only 1 of 4 ranks of world 1" in text, text
    job.await_step(3, cut_s)
    alone = [step for step in job.steps() if step.size == 1]
    assert alone == [], "the smaller part does not train on"
    job.end_continued()
    job.check_steps()
    left = {name: cluster.leftovers(name, 45.0) for name in cluster.names}
    assert not any(left.values()), (left, text)


def test_without_a_successor_the_job_ends_with_its_launcher(new_cluster: NewCluster, start: Start) -> None:
    cluster = new_cluster(3)
    hosts = ",".join(f"{name}:1" for name in cluster.names)
    job = start(cluster, "-H", hosts, "--min-np", "1", "--launcher-loss", "end")
    job.await_size(3)
    time.sleep(2.0)
    cluster.kill_host("server1")
    assert all(cluster.leftovers(name, 45.0) == [] for name in ("server2", "server3"))
    assert job.continued() == ""
