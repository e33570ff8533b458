"""Runs an elastic job and kills its ranks at random moments, also while the others recover or receive the state."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ddlcore.config.table import CHILD_MARK

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def plan(request: pytest.FixtureRequest, seed: int, folder: Path) -> Iterator[None]:
    """Name the plan of a test of chaos when it ends; if it fails, keep all that was written in ``folder``.

    With ``--log-level DEBUG``, that has the time of each registration and refusal, and what each agent told a successor.
    """
    node = request.node.nodeid
    command = f"SOAK_SEEDS={seed + 1} python -m pytest -m '' '{node}'"
    try:
        yield
    except BaseException:
        kept = ROOT / "build" / "chaos" / f"{node.rpartition('::')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.sock"))
        print(f"{command}\nrepeats this plan; what launchers and ranks have written is in {kept}")
        raise
    print(f"{command}\n")


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


def chaos(
    command: Sequence[str],
    size: int,
    faults: int,
    seed: int,
    folder: Path,
    pause_s: float,
    each_s: float = 6.0,
    **variables: str,
) -> tuple[int, str]:
    """Run ``command`` on ``size`` ranks, of which ``faults`` are killed, and return how many were, and what was printed.

    The program makes a file with the number of its process in FOLDER when it has the state, pauses for PAUSE_S in each of
    STEPS steps, and does not end before the file ``enough`` is there, or PATIENCE_S seconds have passed. A fault takes at
    most ``each_s`` seconds, the restart of the process included.
    """
    steps = int(variables["STEPS"])
    chance = random.Random(seed)
    folder.mkdir()
    environ = {**os.environ, **variables, "FOLDER": str(folder), "PAUSE_S": str(pause_s)}
    environ["PATIENCE_S"] = str(20.0 + each_s * faults)
    environ.pop(CHILD_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = [
        "-np",
        str(size),
        "--min-np",
        "1",
        "--restarts",
        "100000",
        "--restart-delay-s",
        "0.02",
        "--log-level",
        "DEBUG",
    ]
    run = [sys.executable, "-m", "ddlcore.launch", "run", *options]
    with open(folder.with_suffix(".out"), "w+") as output:
        job = subprocess.Popen([*run, sys.executable, *command], env=environ, stdout=output, stderr=output)
        try:
            done = 0
            until_s = time.monotonic() + 90.0 + each_s * faults + 4 * steps * pause_s
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
