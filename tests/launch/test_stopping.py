"""A signal stops all processes of a job at the same step; they save, end well, and the launcher says so by its code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddlcore.launch.ranks.exit_status import STOPPED
from tests.launch.starting import Begin

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory among processes is for Linux"),
]

TRAINS = """
import os, sys, time, numpy, ddlcore as ddl
ddl.init()
open(f"pid{ddl.rank()}", "w").write(str(os.getpid()))
for step in range(100000):
    ddl.allreduce(numpy.ones(1000), name="x")
    time.sleep(0.001 * ddl.rank())
    if ddl.should_stop():
        break
    if step == 20:
        open(f"ready{ddl.rank()}", "w").close()
print(f"saved at step {step}")
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""
SECONDS = 30.0


def until(path: Path, job: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + SECONDS
    while not path.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)


def train(begin: Begin, folder: Path, size: int = 3, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{TRAINS}")
    job = begin("run", "-np", str(size), sys.executable, str(script), env=env)
    for rank in range(size):
        until(folder / f"ready{rank}", job)
    return job


def check_stopped(job: subprocess.Popen[str], size: int, reason: str) -> None:
    out, err = job.communicate(timeout=SECONDS)
    steps = re.findall(r"\[(\d)\] saved at step (\d+)", out)
    assert sorted(rank for rank, _ in steps) == [str(rank) for rank in range(size)], (out, err)
    assert len({step for _, step in steps}) == 1, out
    assert job.returncode == STOPPED, err
    assert re.search(rf"asked to stop \({reason}\): the ranks stop at the same step", err), err
    assert "failed" not in err and "Traceback" not in err, err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher(number: signal.Signals, begin: Begin, tmp_path: Path) -> None:
    """As Slurm sends it to a job step before its time is over."""
    job = train(begin, tmp_path)
    job.send_signal(number)
    check_stopped(job, 3, rf"{number.name} on rank \d")


def test_a_signal_to_one_rank(begin: Begin, tmp_path: Path) -> None:
    job = train(begin, tmp_path)
    os.kill(int((tmp_path / "pid2").read_text()), signal.SIGTERM)
    check_stopped(job, 3, "SIGTERM on rank 2")


@pytest.mark.long
def test_a_script_that_fails_after_the_stop(begin: Begin, tmp_path: Path) -> None:
    """The exit code is the script's: a checkpoint may be missing."""
    job = train(begin, tmp_path, 2, {"ENDS_WITH": "7"})
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=SECONDS)
    assert job.returncode == 7 and "failed first: it exited with code 7" in err, err


@pytest.mark.long
def test_no_signals_are_wanted(begin: Begin, tmp_path: Path) -> None:
    """SIGTERM ends the ranks, as it does without should_stop()."""
    job = train(begin, tmp_path, 2, {"DDL_STOP_SIGNALS": ""})
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=SECONDS)
    assert job.returncode == 128 + signal.SIGTERM, (job.returncode, err)
    assert "saved" not in out


FORKS = """
import multiprocessing, os, sys, time, ddlcore as ddl
ddl.init()
assert not ddl.should_stop()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
time.sleep(0.2)
child.terminate()
child.join(10)
print("the child ended by", child.exitcode, ddl.should_stop())
ddl.shutdown()
os.kill(os.getpid(), 15)  # nobody would ever see this request
time.sleep(60)
"""


def test_a_forked_child_and_a_process_without_a_job_end_by_the_signal() -> None:
    """A DataLoader ends its workers by SIGTERM."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=SECONDS)
    assert "the child ended by -15 False" in done.stdout, done.stderr
    assert done.returncode == -signal.SIGTERM
