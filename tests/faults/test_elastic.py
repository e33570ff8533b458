"""Chaos: ranks of an elastic job are killed at random moments, also while the others recover from the last kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddlcore.config.table import CHILD_MARK
from tests.faults.chaos import ROOT, chaos, living, plan, ranks_of

PROGRAM = Path(__file__).with_name("elastic_chaos.py")


def check(text: str) -> None:
    results = [line for line in text.splitlines() if "right " in line]
    assert results, text[-6000:]
    assert all("right True once True" in line for line in results), text[-6000:]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_ranks_are_killed_at_random(seed: int, tmp_path: Path) -> None:
    done, text = chaos([str(PROGRAM)], 3, 12, seed, tmp_path / "pids", 0.01, STEPS="500")
    check(text)
    assert done == 12, text[-6000:]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "3"))))
def test_a_hundred_kills(size: int, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with plan(request, seed, tmp_path):
        done, text = chaos([str(PROGRAM)], size, 120, seed, tmp_path / "pids", 0.02, STEPS="2000")
        check(text)
        assert done == 120, text[-6000:]
        print(f"seed {seed}, {size} ranks: {done} kills, {text.count('ddl run: world ')} changes of world, all right")


@pytest.mark.timeout(330)
@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("another_dies", [False, True])
def test_a_rank_that_stands_still_is_evicted(another_dies: bool, tmp_path: Path) -> None:
    """It is stopped by a signal; the others go on without it, and it is started again.

    If another rank dies at the same time, the stopped one does not come to the next world, and must not delay it for ever.
    """
    folder = tmp_path / "pids"
    folder.mkdir()
    environ = {**os.environ, "STEPS": "300", "FOLDER": str(folder), "PAUSE_S": "0.03", "PATIENCE_S": "220"}
    environ.pop(CHILD_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = ["-np", "3", "--min-np", "1", "--evict-after-s", "6", "--stall-warning-s", "1"]
    run = [sys.executable, "-m", "ddlcore.launch", "run", *options, sys.executable, str(PROGRAM)]
    with open(tmp_path / "out", "w+") as output:
        job = subprocess.Popen(run, env=environ, stdout=output, stderr=output)
        try:
            until_s = time.monotonic() + 100.0  # a busy machine may keep a good rank from answering for seconds
            while len(living(folder)) < 3:
                assert time.monotonic() < until_s, "not all ranks train"
                time.sleep(0.05)
            first, second, _ = before = sorted(ranks_of(job.pid))
            until_s = time.monotonic() + 100.0
            os.kill(first, signal.SIGSTOP)
            if another_dies:
                os.kill(second, signal.SIGKILL)
            while len(living(folder)) < 3 or first in living(folder):
                text = (tmp_path / "out").read_text()[-6000:]
                assert job.poll() is None, f"the job has ended with code {job.returncode}:\n{text}"
                assert time.monotonic() < until_s, f"the stopped rank was not replaced:\n{text}"
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
    assert text.count("(SIGKILL) by the launcher: ") == 1, (
        f"the launcher ends who stands still, and nobody else: {text}"
    )
    assert "it is started again" in text, text
