"""Runs an elastic job on the hosts of a test cluster, while ranks are killed, and hosts hang, are cut off, or are lost."""

from __future__ import annotations

import random
import signal
import subprocess
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.faults.chaos import ROOT
from tests.launch.starting import DDL
from tools.test_cluster import TestCluster

NewCluster = Callable[..., TestCluster]
PROGRAM = ROOT / "tests" / "faults" / "elastic_chaos.py"


def agents_on(cluster: TestCluster, name: str) -> list[int]:
    """Return the processes of agents on the host ``name``, by their numbers there."""
    return [pid for pid, command in cluster.processes(name).items() if "launch.agents.agent" in command]


def ranks_on(cluster: TestCluster, name: str, program: str = PROGRAM.name) -> list[int]:
    """Return the processes of ranks, which run ``program``, on the host ``name``, by their numbers there."""
    return [
        pid
        for pid, command in cluster.processes(name).items()
        if program in command and "ddlcore" not in command and "ssh" not in command
    ]


def are_right(folder: Path, text: str) -> None:
    """Check the results of PROGRAM in ``text``, the output of the job."""
    results = [line for line in text.splitlines() if "right " in line]
    assert results and all("right True once True" in line for line in results), text[-6000:]


class HostChaos:
    """A training with one rank on each host of ``cluster``, and the faults that strike it.

    ``command`` is the training: it takes STEPS steps, each of which pauses for PAUSE_S, and the last ones after a file
    ``enough`` is in FOLDER, or after PATIENCE_S; each process calls ``has_state`` of tests/faults/marks.py once it has the
    state. ``check`` is called with ``folder`` and what the job has written. A rank is back within ``back_s`` seconds.
    """

    def __init__(
        self,
        cluster: TestCluster,
        folder: Path,
        steps: int,
        seed: int,
        patience_s: float,
        command: Sequence[str] = (str(PROGRAM),),
        variables: Mapping[str, str] = types.MappingProxyType({}),
        check: Callable[[Path, str], None] = are_right,
        back_s: float = 8.0,
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self._program, self._check, self._back_s = Path(command[0]).name, check, back_s
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
        env = {"PYTHONPATH": str(ROOT), "STEPS": str(steps), "FOLDER": str(folder), "PAUSE_S": "0.02", **variables}
        env["STATES"] = str(folder)
        env["PATIENCE_S"] = str(patience_s)
        output = open(folder / "terminal", "w")  # noqa: SIM115  # closed below; the process has its own descriptor
        self.launcher = cluster.popen(
            "server1",
            [*DDL, "run", *options, "python", *command],
            cwd=folder,
            env=env,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
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
            if any((self.folder / f"state.{name}.{pid}").exists() for pid in self._ranks_on(name))
        ]

    def _ranks_on(self, name: str) -> list[int]:
        return ranks_on(self.cluster, name, self._program)

    def await_all(self, told_s: float = 2.5) -> None:
        """Wait until a rank on each host that is left is in the training, and until the agents know of that."""
        self.until(lambda: self.holders() == self.there, "a rank on each host has the state")
        time.sleep(told_s)  # a successor needs what the launcher tells the agents once a second

    def kill_some(self, count: int) -> None:
        """Kill ``count`` processes of ranks, sometimes several at once; never those of all hosts."""
        goal = self.done + count
        until_s = time.monotonic() + 30.0 + self._back_s * count
        while self.done < goal:
            assert time.monotonic() < until_s, self.text()[-6000:]
            holders = self.holders()
            if not holders:
                time.sleep(0.2)
                continue
            spared = self._chance.choice(holders)  # somebody must keep the state
            others = [name for name in self.there if name != spared]
            for name in self._chance.sample(others, self._chance.randint(1, min(2, len(others)))):
                for pid in self._ranks_on(name)[:1]:
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
        stopped += self._ranks_on(name) if kind == "stop all" else []
        for pid in stopped:
            cluster.run(name, ["kill", "-STOP", str(pid)])  # it may just have ended
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
            cluster.run(name, ["kill", "-CONT", str(pid)])
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
        self._check(self.folder, text)
        for name in (*self.there, *self.given_up):
            assert self.cluster.leftovers(name, 20.0) == []


def stormy(chaos: HostChaos, seed: int, before: int, after: int) -> None:
    """Inject ``before`` faults, cut the power of the launcher's host, inject ``after`` more faults, and check the results."""
    try:
        chaos.await_all()
        chaos.storm(before)
        chaos.await_all()
        chaos.cut("server1")
        chaos.await_successor()
        chaos.kill_some(3)  # within the first second of the successor
        chaos.storm(after)
        chaos.end()
    finally:
        print("; ".join(chaos.said))
    assert chaos.done >= before + after + 4
    worlds = chaos.text().count("ddl run: world ")
    print(f"seed {seed}: {chaos.done} faults, {len(chaos.said)} of them of hosts, {worlds} changes of world, all right")
