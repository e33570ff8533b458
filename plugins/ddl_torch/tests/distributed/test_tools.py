"""The examples of docs/torch-backend.md: what users of torch.distributed run, only with another backend's name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from plugins.ddl_torch.tests.launching import EXAMPLES, launch

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(600)]

NAMES = ["torch_ddp_digits.py", "torch_fsdp_digits.py"]


def facts(shown: str) -> tuple[float, set[str]]:
    """Return the test accuracy in %, and the digests of the parameters on all ranks."""
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    assert len(re.findall(r"rank \d of 2: parameters", shown)) == 2, shown
    return float(accuracy), set(re.findall(r"parameters (\w{12})", shown))


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    """On ddl, under ``ddl run``, to the same accuracy as on Gloo; all ranks have the same parameters."""
    accuracy, digests = facts(launch(2, EXAMPLES / name))
    other, _ = facts(launch(2, EXAMPLES / name, "--backend", "gloo"))
    assert accuracy >= 95.0 and abs(accuracy - other) < 1.5
    assert len(digests) == 1


def test_sharded_parameters_come_to_the_same_bits() -> None:
    """FSDP2 computes what DistributedDataParallel computes: two ranks add two gradients in either."""
    digests = [facts(launch(2, EXAMPLES / name, "--epochs", "2"))[1] for name in NAMES]
    assert len(set.union(*digests)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_under_torchrun(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    accuracy, digests = facts(done.stdout)
    assert accuracy >= 95.0 and len(digests) == 1
