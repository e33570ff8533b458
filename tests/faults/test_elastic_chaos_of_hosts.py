"""Chaos on hosts that are network namespaces: ranks are killed at random moments, and the host of the launcher is lost.

When it is lost, a successor serves on another host, which is then lost, too. The result must be that of one process that
nothing has disturbed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.chaos import ROOT, plan
from tests.launch.starting import DDL
from tools.test_cluster import TestCluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed"),
]
NewCluster = Callable[..., TestCluster]
PROGRAM = ROOT / "tests" / "faults" / "elastic_chaos.py"


def agents_on(cluster: TestCluster, name: str) -> list[int]:
    """Return the processes of agents on the host ``name``, by their numbers there."""
    return [pid for pid, command in cluster.processes(name).items() if "launch.agents.agent" in command]


def ranks_on(cluster: TestCluster, name: str) -> list[int]:
    """Return the processes of ranks on the host ``name``, by their numbers there."""
    return [
        pid
        for pid, command in cluster.processes(name).items()
        if "elastic_chaos" in command and "ddlcore" not in command and "ssh" not in command
    ]


class HostChaos:
    """A training with one rank on each host of ``cluster``, and the faults that strike it."""

    def __init__(
        self, cluster: TestCluster, folder: Path, steps: int, seed: int, patience_s: float, state_bytes: int = 0
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.there = list(cluster.names)
        self.lost: list[str] = []
        self.given_up: list[str] = []  # hosts that live, but that a successor does not take back
        self.said: list[str] = []
        self.coordinates = "server1"  # the host of the launcher or its successor
        self.done = 0
        self._chance = random.Random(seed)
        hosts = ",".join(f"{name}:1" for name in cluster.names)
        options = ["-H", hosts, "--min-np", "1", "--restarts", "100000", "--restart-delay-s", "0.02"]
        options += ["--log-level", "DEBUG", "--host-cooldown-s", "1 4"]
        env = {"PYTHONPATH": str(ROOT), "STEPS": str(steps), "FOLDER": str(folder), "PAUSE_S": "0.02"}
        env["STATES"] = str(folder)
        env["PATIENCE_S"] = str(patience_s)
        env["STATE_BYTES"] = str(state_bytes)
        command = [*DDL, "run", *options, "python", str(PROGRAM)]
        output = open(folder / "terminal", "w")  # noqa: SIM115  # closed below; the process has its own descriptor
        self.launcher = cluster.popen(
            "server1", command, cwd=folder, env=env, stdout=output.fileno(), stderr=subprocess.STDOUT
        )
        output.close()

    def text(self) -> str:
        """Return everything that the launcher and its successors have written."""
        files = [self.folder / "terminal", *sorted(self.folder.glob("ddl-continued-*/output"))]
        return "".join(file.read_text() for file in files)

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
        until_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until_s, f"{what}\n{self.text()[-6000:]}"
            time.sleep(0.05)

    def holders(self) -> list[str]:
        """Return the hosts that are left with a rank that has been in a world, and so has a state."""
        return [
            name
            for name in self.there
            if any((self.folder / f"state.{name}.{pid}").exists() for pid in ranks_on(self.cluster, name))
        ]

    def await_all(self, told_s: float = 2.5) -> None:
        """Wait until a rank on each host that is left is in the training, and until the agents know of that."""
        self.until(lambda: self.holders() == self.there, "a rank on each host has the state")
        time.sleep(told_s)  # a successor needs what the launcher tells the agents once a second

    def kill_some(self, count: int) -> None:
        """Kill ``count`` processes of ranks, sometimes several at once; never those of all hosts."""
        goal = self.done + count
        until_s = time.monotonic() + 30.0 + 8.0 * count
        while self.done < goal:
            assert time.monotonic() < until_s, self.text()[-6000:]
            holders = self.holders()
            if not holders:
                time.sleep(0.2)
                continue
            spared = self._chance.choice(holders)  # somebody must keep the state
            others = [name for name in self.there if name != spared]
            for name in self._chance.sample(others, self._chance.randint(1, min(2, len(others)))):
                for pid in ranks_on(self.cluster, name)[:1]:
                    self.cluster.kill(name, pid, signal.SIGKILL)
                    self.done += 1
                time.sleep(self._chance.choice([0.0, 0.05, 0.3]))
            time.sleep(self._chance.choice([0.3, 1.0, 2.0]))

    def storm(self, count: int) -> None:
        """Let ``count`` faults strike: kills, and hosts that hang, or that the others do not reach, for a while.

        Such a fault begins when all ranks train, so that those that are left are a quorum, and may last longer than the
        silence after which a host is given up. Its host then comes back while the launcher lives, which calls it again; a
        successor calls no host.
        """
        goal = self.done + count
        while self.done < goal:
            kind = self._chance.choice(["kill", "kill", "stop the agent", "stop all", "cable", "one direction"])
            if kind == "kill":
                self.kill_some(self._chance.randint(1, 3))
                continue
            self.await_all(0.0)
            name = self._chance.choice([name for name in self.there if name != self.coordinates])
            # A successor does not get hosts back, and those that are left must be a quorum.
            long = [5.0, 7.0] if not self.lost or len(self.there) > 3 else []
            lasts_s = self._chance.choice([0.3, 1.0, *long])
            self.said.append(f"{kind} of {name} for {lasts_s:g} s")
            self._disturb(kind, name, lasts_s)
            self.done += 1

    def _disturb(self, kind: str, name: str, lasts_s: float) -> None:
        cluster = self.cluster
        stopped = agents_on(cluster, name) if kind.startswith("stop") else []
        stopped += ranks_on(cluster, name) if kind == "stop all" else []
        for pid in stopped:
            cluster.kill(name, pid, signal.SIGSTOP)
        if kind == "cable":
            cluster.link(name, up=False)
        if kind == "one direction":
            cluster.mute(name)
        time.sleep(lasts_s)
        if kind == "cable":
            cluster.link(name, up=True)
        if kind == "one direction":
            cluster.mute(name, False)
        for pid in stopped:
            cluster.run(name, ["kill", "-CONT", str(pid)])  # it may have been killed meanwhile
        if lasts_s > 3.0 and self.lost:  # a successor calls no host
            self.until(lambda: cluster.leftovers(name, 0.0) == [], f"{name} is given up")
            self.there.remove(name)
            self.given_up.append(name)

    def cut(self, name: str) -> None:
        """Cut the power of the host ``name``."""
        self.cluster.kill_host(name)
        self.there.remove(name)
        self.lost.append(name)
        self.done += 1

    def serves_on(self, name: str) -> bool:
        return f"this process on {name} takes the place of the launcher" in self.text()

    def await_successor(self) -> None:
        """Wait until a successor serves. It is on the host whose agent was called first, and has not been lost since."""
        self.until(lambda: any(map(self.serves_on, self.there)), "a successor serves")
        self.coordinates = next(name for name in self.there if self.serves_on(name))

    def codes(self) -> list[str]:
        """Return what is in the file with the exit code of the job, if it is there."""
        return [text for file in self.folder.glob("ddl-continued-*/exit_code") if (text := file.read_text())]

    def end(self) -> None:
        """Let the training end, and check its results."""
        (self.folder / "enough").touch()
        self.until(lambda: bool(self.codes()), "the job ends", 120.0)
        text = self.text()
        assert self.codes() == ["0\n"], text[-6000:]
        results = [line for line in text.splitlines() if "right " in line]
        assert results and all("right True once True" in line for line in results), text[-6000:]
        for name in (*self.there, *self.given_up):
            assert self.cluster.leftovers(name, 20.0) == []


@pytest.mark.long
def test_ranks_and_the_host_of_the_launcher(new_cluster: NewCluster, tmp_path: Path) -> None:
    chaos = HostChaos(new_cluster(4), tmp_path, 400, 1, 200.0)
    chaos.await_all()
    chaos.kill_some(3)
    chaos.await_all()
    chaos.cut("server1")
    chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
    chaos.await_all()
    chaos.kill_some(3)
    chaos.end()


@pytest.mark.long
def test_an_agent_that_comes_late_to_a_successor(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Its news of an old world, in which the lost host would decide, do not end the training of the ranks that are left.

    The first two ranks were alone for a moment, and then trained with the third one. One of them is on the lost host. The
    agent of the third one is stopped, so the second rank has registered with the successor before that agent comes.
    """
    chaos = HostChaos(new_cluster(3), tmp_path, 400, 0, 200.0)
    cluster = chaos.cluster
    chaos.await_all()
    cluster.kill("server3", ranks_on(cluster, "server3")[0], signal.SIGKILL)
    chaos.until(lambda: "world 3: rank 2 on server3 is back" in chaos.text(), "the third rank comes back")
    assert "world 2: rank 2 on server3 died (SIGKILL); 2 ranks go on" in chaos.text()
    chaos.await_all()
    agents = agents_on(cluster, "server3")
    for agent in agents:
        cluster.kill("server3", agent, signal.SIGSTOP)
    chaos.cut("server1")
    chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
    time.sleep(3.0)  # the rank on its host has registered; if not, this test sees less
    for agent in agents:
        cluster.kill("server3", agent, signal.SIGCONT)
    chaos.end()
    assert "ranks 2" in chaos.text()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_hundred_faults(new_cluster: NewCluster, tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """A hundred kills, and two hosts with the launcher and its successor: while all train, and amid a recovery."""
    with plan(request, seed, tmp_path):
        chaos = HostChaos(new_cluster(5), tmp_path, 3000, seed, 1700.0)
        chaos.await_all()
        chaos.kill_some(33)
        chaos.await_all()
        chaos.cut("server1")
        chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
        chaos.kill_some(33)
        chaos.await_all()
        chaos.cut("server2")
        chaos.until(lambda: chaos.serves_on("server3"), "another successor serves")
        chaos.kill_some(34)
        chaos.end()
        assert chaos.done >= 102  # the last kill may have been one of two
        worlds = chaos.text().count("ddl run: world ")
        print(f"seed {seed}: 100 kills, 2 hosts with the launcher, {worlds} changes of world, all right")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_storm(new_cluster: NewCluster, tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """Hosts hang, are cut off in one direction or both, and come back; the launcher's host is lost. The state is large."""
    with plan(request, seed, tmp_path):
        chaos = HostChaos(new_cluster(6), tmp_path, 3000, seed, 1700.0, 64 << 20)
        try:
            chaos.await_all()
            chaos.storm(40)
            chaos.await_all()
            chaos.cut("server1")
            chaos.await_successor()
            chaos.kill_some(3)  # within the first second of the successor
            chaos.storm(10)
            chaos.end()
        finally:
            print("; ".join(chaos.said))
        assert chaos.done >= 54
        worlds = chaos.text().count("ddl run: world ")
        print(
            f"seed {seed}: {chaos.done} faults, {len(chaos.said)} of them of hosts, {worlds} changes of world, all right"
        )
