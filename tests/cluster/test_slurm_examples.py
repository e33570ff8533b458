"""The batch files of examples/slurm run as they stand, on two nodes; and what a cluster's handbook does by hand does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.test_cluster import Slurm

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(450)]
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


@pytest.mark.parametrize("name", ["torch_srun.sh", "torch_ddl_run.sh"])
def test_torch_learns_on_two_nodes(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """Four ranks that srun or ddl run started learn, and end with the same parameters."""
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
