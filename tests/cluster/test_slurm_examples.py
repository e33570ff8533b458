"""The batch files of examples/slurm run as they stand, on two nodes; and what a cluster's handbook does by hand does."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tools.test_cluster import Slurm

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(450)]
ROOT = Path(__file__).resolve().parents[2]
JOB_S = 120.0
ACCURACY = 95.0  # percent

# One step a node, each told by hand which worker it is, in the background of the batch script.
BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gres=gpu:1
#SBATCH --mem=64000
nodes=($(scontrol show hostname "$SLURM_NODELIST"))
workers='["'${nodes[0]}':33562", "'${nodes[1]}':33561"]'
export OMP_NUM_THREADS=1
for index in 0 1; do
    TF_CONFIG='{"cluster": {"worker": '$workers'}, "task": {"index": '$index', "type": "worker"}}' \\
        srun -w "${nodes[index]}" -N 1 --ntasks=1 --gres=gpu:1 python examples/foreign/tf_multiworker.py --steps 50 &
done
wait
"""


def ran(slurm: Slurm, script: Path, tmp_path: Path) -> str:
    """What the job wrote to its standard output. It ended well, and left nothing on a node."""
    out, err = tmp_path / "out", tmp_path / "err"
    job = slurm.submit([f"--output={out}", f"--error={err}", script], cwd=ROOT)
    ended = slurm.wait(job, JOB_S)
    assert ended == ("COMPLETED", 0), out.read_text() + err.read_text()
    assert [slurm.cluster.leftovers(name, patience_s=40.0) for name in slurm.cluster.names] == [[], []]
    return out.read_text()


@pytest.mark.parametrize("name", ["torch_srun.sh", "torch_ddl_run.sh", "torch_backend_srun.sh"])
def test_torch_learns_on_two_nodes(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """Four ranks, started by srun or by ddl run, learn and end with the same parameters. One file uses torch.distributed."""
    pytest.importorskip("torch")
    told = ran(slurm, ROOT / "examples/slurm" / name, tmp_path)
    accuracy = re.search(r"test accuracy ([\d.]+) %", told)
    assert accuracy is not None and float(accuracy[1]) >= ACCURACY, told
    ranks = dict(re.findall(r"rank (\d) of 4: parameters (\w+)", told))
    assert sorted(ranks) == ["0", "1", "2", "3"] and len(set(ranks.values())) == 1, told


@pytest.mark.parametrize("by_hand", [False, True], ids=["ddl-run", "by-hand"])
def test_tensorflows_own_workers_meet_on_two_nodes(slurm: Slurm, tmp_path: Path, by_hand: bool) -> None:
    """With the TF_CONFIG that ddl run gives each, and with one that the batch file writes for each."""
    pytest.importorskip("tensorflow")
    script = ROOT / "examples/slurm/tf_multiworker.sh"
    if by_hand:
        script = tmp_path / "by_hand.sh"
        script.write_text(BY_HAND)
    workers = dict(re.findall(r"worker (\d) of 2: (test accuracy .*)", ran(slurm, script, tmp_path)))
    assert sorted(workers) == ["0", "1"] and workers["0"] == workers["1"]


WAITS_FOR_A_SIGNAL = """
import pathlib, time, numpy, ddlcore as ddl
ddl.init()
step = 0
while not ddl.should_stop():
    ddl.allreduce(numpy.ones(10), name="x")
    time.sleep(0.01)
    step += 1
    pathlib.Path(f"up.{ddl.rank()}").touch()
print(f"rank {ddl.rank()} of {ddl.size()} stops after step {step}")
"""


@pytest.mark.parametrize("to", ["batch script", "steps"])
def test_a_job_stops_at_a_step_and_asks_for_another_turn(slurm: Slurm, tmp_path: Path, to: str) -> None:
    """The batch file of docs/stopping.md, with the signal that Slurm would send before the time is over."""
    (block,) = [one for one in blocks("docs/stopping.md") if one.language == "bash"]
    (tmp_path / "train.py").write_text(WAITS_FOR_A_SIGNAL)
    (tmp_path / "job.sh").write_text(block.code.replace("scontrol requeue", "echo would requeue").replace("=4", "=2"))
    job = slurm.submit([f"--output={tmp_path / 'out'}", "job.sh"], cwd=tmp_path)
    deadline_s = time.monotonic() + JOB_S
    while len(list(tmp_path.glob("up.*"))) < 4:
        assert time.monotonic() < deadline_s, (tmp_path / "out").read_text()
        time.sleep(0.1)
    slurm.run(["scancel", "--signal=USR1", *(["--batch"] if to == "batch script" else []), str(job)], check=True)
    ended = slurm.wait(job, JOB_S)
    told = (tmp_path / "out").read_text()
    assert ended == ("FAILED", 85), told
    assert f"would requeue {job}" in told
    steps = dict(re.findall(r"rank (\d) of 4 stops after step (\d+)", told))
    assert sorted(steps) == ["0", "1", "2", "3"] and len(set(steps.values())) == 1, told
