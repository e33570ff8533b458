"""Chaos: ranks of an elastic job are killed at random moments, also while the others recover from the last kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddlcore.config import CHILD_MARK

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("elastic_chaos.py")


def living(folder: Path) -> list[int]:
    """Return the processes that have the state of the training."""
    found = []
    for file in folder.glob("[0-9]*"):
        try:
            os.kill(int(file.name), 0)
            state = Path(f"/proc/{file.name}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            continue
        if state != "Z":
            found.append(int(file.name))
    return found


def ranks_of(launcher: int) -> list[int]:
    """Return all processes of ranks, those included that are only starting."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(one) for one in children]


def chaos(size: int, steps: int, faults: int, seed: int, folder: Path, pause_s: float) -> tuple[int, str]:
    """Run a training in which ``faults`` kills happen, and return how many did, and what was printed."""
    chance = random.Random(seed)
    folder.mkdir()
    environ = {**os.environ, "STEPS": str(steps), "FOLDER": str(folder), "PAUSE_S": str(pause_s)}
    environ["PATIENCE_S"] = str(6.0 * faults)
    environ.pop(CHILD_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = ["-np", str(size), "--min-np", "1", "--restarts", "100000", "--restart-delay-s", "0.02"]
    run = [sys.executable, "-m", "ddlcore.launch", "run", *options]
    with open(folder.with_suffix(".out"), "w+") as output:
        job = subprocess.Popen([*run, sys.executable, str(PROGRAM)], env=environ, stdout=output, stderr=output)
        try:
            done = 0
            until_s = time.monotonic() + 90.0 + 6.0 * faults + 4 * steps * pause_s
            while job.poll() is None:
                assert time.monotonic() < until_s, "the job has not ended"
                there = living(folder)
                if done >= faults:
                    # Only now may the training end: a rank that is killed after its end has failed, because its script
                    # has not ended.
                    (folder / "enough").touch()
                if done >= faults or len(there) < 2:
                    time.sleep(0.02)
                    continue
                spared = chance.choice(there)  # somebody must keep the state
                for _ in range(chance.choice([1, 1, 2, 3])):
                    others = [pid for pid in ranks_of(job.pid) if pid != spared]
                    if others and done < faults:
                        try:
                            os.kill(chance.choice(others), signal.SIGKILL)
                        except ProcessLookupError:
                            continue
                        done += 1
                    time.sleep(chance.choice([0.0, 0.01, 0.05, 0.2, 0.5]))
                time.sleep(chance.choice([0.05, 0.3, 1.0]))
        except BaseException:
            job.kill()
            raise
        finally:
            job.wait(30.0)
        output.seek(0)
        text = output.read()
    assert job.returncode == 0, text[-6000:]
    return done, text


def check(text: str) -> None:
    results = [line for line in text.splitlines() if "right " in line]
    assert results, text[-6000:]
    assert all("right True once True" in line for line in results), text[-6000:]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_ranks_are_killed_at_random(seed: int, tmp_path: Path) -> None:
    done, text = chaos(3, 500, 12, seed, tmp_path / "pids", 0.01)
    check(text)
    assert done == 12, text[-6000:]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "3"))))
def test_a_hundred_kills(size: int, seed: int, tmp_path: Path) -> None:
    done, text = chaos(size, 2000, 120, seed, tmp_path / "pids", 0.02)
    check(text)
    assert done == 120, text[-6000:]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("another_dies", [False, True])
def test_a_rank_that_stands_still_is_evicted(another_dies: bool, tmp_path: Path) -> None:
    """It is stopped by a signal; the others go on without it, and it is started again.

    If another rank dies at the same time, the stopped one does not come to the next world, and must not delay it for ever.
    """
    folder = tmp_path / "pids"
    folder.mkdir()
    environ = {**os.environ, "STEPS": "300", "FOLDER": str(folder), "PAUSE_S": "0.03", "PATIENCE_S": "60"}
    environ.pop(CHILD_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = ["-np", "3", "--min-np", "1", "--evict-after-s", "2", "--stall-warning-s", "1"]
    run = [sys.executable, "-m", "ddlcore.launch", "run", *options, sys.executable, str(PROGRAM)]
    with open(tmp_path / "out", "w+") as output:
        job = subprocess.Popen(run, env=environ, stdout=output, stderr=output)
        try:
            until_s = time.monotonic() + 60.0
            while len(living(folder)) < 3:
                assert time.monotonic() < until_s, "not all ranks train"
                time.sleep(0.05)
            first, second, _ = before = sorted(ranks_of(job.pid))
            os.kill(first, signal.SIGSTOP)
            if another_dies:
                os.kill(second, signal.SIGKILL)
            while len(living(folder)) < 3 or first in living(folder):
                assert time.monotonic() < until_s, "the stopped rank was not replaced"
                time.sleep(0.05)
            assert len(set(before) & set(ranks_of(job.pid))) == (1 if another_dies else 2)
            (folder / "enough").touch()
            assert job.wait(60.0) == 0
        finally:
            job.kill()
            job.wait(30.0)
        output.seek(0)
        text = output.read()
    check(text)
    assert "(SIGKILL) by the launcher: " in text and "it is started again" in text, text
