"""A Slurm cluster on a test cluster runs steps and batch jobs on both nodes, says how they ended, and leaves nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.test_cluster import Slurm

pytestmark = pytest.mark.processes


def test_a_step_runs_on_both_nodes(slurm: Slurm) -> None:
    """Four tasks, two a node, each with its number; more tasks than a node has cores, with -O."""
    step = slurm.run(["srun", "-N2", "-n4", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $(hostname)"])
    assert sorted(step.stdout.splitlines()) == ["0 server1", "1 server1", "2 server2", "3 server2"], step.stderr
    crowded = slurm.run(["srun", "-O", "-N1", "-n", "70", "hostname"])
    assert crowded.stdout.splitlines() == ["server1"] * 70, crowded.stderr


def test_srun_ends_as_its_tasks_do(slurm: Slurm) -> None:
    """With the highest of their exit codes."""
    assert slurm.run(["srun", "-n", "3", "sh", "-c", "exit $SLURM_PROCID"]).returncode == 2


def test_a_batch_job_writes_where_it_was_told(slurm: Slurm, tmp_path: Path) -> None:
    """Its output stands in a file of the folder that it was submitted from; its exit code is the script's."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH -N 2 -n 2 -o out.txt --gres=gpu:2 --mem=64000\nsrun hostname\nexit 3\n")
    job = slurm.submit([script], cwd=tmp_path)
    assert slurm.wait(job) == ("FAILED", 3)
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == ["server1", "server2"]


@pytest.mark.long
def test_a_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """Neither its batch script nor its step's tasks are left on a node."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH -N 2 -n 2 -o out.txt\nsrun sh -c 'echo up; exec sleep 60'\n")
    job = slurm.submit([script], cwd=tmp_path)
    deadline_s = time.monotonic() + 80.0
    while not (tmp_path / "out.txt").exists() or (tmp_path / "out.txt").read_text() != "up\nup\n":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    slurm.cancel(job)
    assert slurm.wait(job)[0] == "CANCELLED"
    assert [slurm.cluster.leftovers(name, patience_s=40.0) for name in slurm.cluster.names] == [[], []]


def test_a_cluster_comes_up_and_goes(slurm: Slurm) -> None:
    """Even beside another; nothing of it is in this machine's own folders."""
    begun_s = time.monotonic()
    with Slurm(1) as other:
        assert time.monotonic() - begun_s < 60.0
        assert other.run(["srun", "hostname"]).stdout == "server1\n"
        directory = other.cluster.directory
        assert slurm.run(["squeue", "--noheader"]).stdout == ""
    assert not directory.exists() and not Path("/run/slurm").exists()
