"""Starts trainings of tools/bench_elastic.py, kills their ranks, and reads from their logs what the ranks did when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Fault", "Job", "Rank", "fault", "parse", "run"]

PROGRAM = Path(__file__).with_name("training.py")
ROOT = Path(__file__).parents[2]
SETTLED = 20  # steps that all ranks do together before the next is killed
TIMEOUT_S = 90.0
STOPPED = 85  # how a job ends that was asked to stop


@dataclass
class Rank:
    """What one process has written: when it was imported, and its steps as (moment, number, ranks of the world).

    ``messages``: how many control messages it had sent after which step.
    """

    import_s: float | None = None
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    messages: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """What one kill has cost, in seconds since the kill unless stated otherwise.

    ``recovered_s``: until the last survivor has completed a step. ``back_s``: until the new process has. ``import_s``:
    what of that the new process took from its start until its imports were done. ``still_s``: how long the others did
    nothing because it joined, from their last step without it to their first with it.
    """

    recovered_s: float
    back_s: float
    import_s: float
    still_s: float


def parse(text: str) -> Rank:
    """Return what a process has written so far; the last line may be incomplete."""
    rank = Rank()
    for line in text.split("\n")[:-1]:
        word, *numbers = line.split()
        if word == "imported":
            rank.import_s = float(numbers[1])
        elif word == "messages":
            rank.messages.append((int(numbers[1]), int(numbers[2])))
        else:
            rank.steps.append((float(numbers[0]), int(numbers[1]), int(numbers[2])))
    return rank


def fault(killed: int, moment_s: float, size: int, ranks: dict[int, Rank]) -> Fault | None:
    """Return what it cost that process ``killed`` was killed at ``moment_s``; None: the world is not whole again yet."""
    before = {pid for pid, rank in ranks.items() if rank.steps and rank.steps[0][0] < moment_s}
    survivors = [
        rank for pid, rank in ranks.items() if pid in before and pid != killed and rank.steps[-1][0] > moment_s
    ]
    newcomers = [rank for pid, rank in ranks.items() if pid not in before and rank.steps]
    fewer = [[step[0] for step in rank.steps if step[0] > moment_s and step[2] == size - 1] for rank in survivors]
    if len(survivors) != size - 1 or len(newcomers) != 1 or not all(fewer):
        return None
    whole = [
        [step[0] for step in rank.steps if step[0] > moments[0] and step[2] == size]
        for rank, moments in zip(survivors, fewer)
    ]
    if not all(len(moments) >= SETTLED for moments in whole):
        return None
    (newcomer,) = newcomers
    assert newcomer.import_s is not None
    return Fault(
        recovered_s=max(moments[0] for moments in fewer) - moment_s,
        back_s=newcomer.steps[0][0] - moment_s,
        import_s=newcomer.import_s,
        still_s=max(after[0] - [one for one in moments if one < after[0]][-1] for moments, after in zip(fewer, whole)),
    )


class Job:
    """A running training of ``size`` ranks."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes], size: int) -> None:
        self.folder = folder
        self.launcher = launcher
        self.size = size

    def ranks(self) -> dict[int, Rank]:
        """Return what each process has written so far."""
        return {int(file.name): parse(file.read_text()) for file in self.folder.glob("[0-9]*")}

    def living(self) -> list[int]:
        """Return the processes that train now in a world of all ranks."""
        now_s = time.monotonic()
        ranks = self.ranks().items()
        return [
            pid
            for pid, rank in ranks
            if rank.steps and rank.steps[-1][2] == self.size and now_s - rank.steps[-1][0] < 1
        ]

    def wait_settled(self) -> None:
        """Wait until all ranks have done SETTLED steps in one world."""
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s and self.launcher.poll() is None:
            last = [rank.steps[-SETTLED:] for rank in self.ranks().values() if rank.steps]
            now_s = time.monotonic()
            whole = [one for one in last if len(one) == SETTLED and one[0][2] == self.size and now_s - one[-1][0] < 1.0]
            if len(whole) == self.size:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the ranks do not train together:\n{self.output()}")

    def kill(self, chance: random.Random) -> tuple[int, float]:
        """Kill one of the ranks that train, and return its process and the moment."""
        pid = chance.choice(sorted(self.living()))
        moment_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return pid, moment_s

    def cost_of_a_kill(self, chance: random.Random) -> Fault:
        """Kill one rank, wait until it is back, and return what that cost."""
        self.wait_settled()
        time.sleep(chance.uniform(0.0, 0.2))
        pid, moment_s = self.kill(chance)
        known = set(self.ranks())
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s and self.launcher.poll() is None:
            # Processes of earlier faults have written their steps before, and end no world now.
            ranks = {one: rank for one, rank in self.ranks().items() if one not in known or _trained(rank, moment_s)}
            cost = fault(pid, moment_s, self.size, ranks)
            if cost is not None:
                return cost
            time.sleep(0.05)
        raise RuntimeError(f"process {pid} was killed and has not come back:\n{self.output()}")

    def output(self) -> str:
        return (self.folder / "output").read_text()[-3000:]


def _trained(rank: Rank, moment_s: float) -> bool:
    return bool(rank.steps) and rank.steps[-1][0] > moment_s - 1.0


@contextlib.contextmanager
def run(size: int, compute_ms: float, way: str) -> Iterator[Job]:
    """Start a training of ``size`` ranks whose steps compute ``compute_ms``, and end it by SIGUSR1 at the end of the block.

    ``way``: "elastic", or "plain" for a script and a job without anything elastic. Each lost rank is started again at once,
    as for its first loss. Raises RuntimeError if the job fails.
    """
    options = ["--min-np", "1", "--restarts", "100000", "--restart-delay-s", "0"] if way == "elastic" else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(size), *options]
        command += [sys.executable, str(PROGRAM), name, str(compute_ms), way]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        with open(folder / "output", "w") as output:
            launcher = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
        job = Job(folder, launcher, size)
        try:
            yield job
            launcher.send_signal(signal.SIGUSR1)
            launcher.wait(TIMEOUT_S)
        except BaseException:
            launcher.terminate()
            raise
        finally:
            try:
                launcher.wait(20.0)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        if launcher.returncode not in (0, STOPPED):
            raise RuntimeError(f"the job ended with exit code {launcher.returncode}:\n{job.output()}")
