"""TensorFlow's own multi-worker training runs under ``ddl run`` unchanged, by the variable that it knows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.launch.starting import Ddl

pytestmark = [pytest.mark.processes, pytest.mark.long]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "foreign" / "tf_multiworker.py"


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_two_workers_train_and_agree(ddl: Ddl) -> None:
    """Both see a cluster of two, and end with the same weights."""
    done = ddl("run", "-np", "2", "python", str(SCRIPT), "--steps", "60")
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"\[[01]\] worker ([01]) of 2: test accuracy ([\d.]+), sum ([\d.]+)$", done.stdout, re.MULTILINE)
    assert sorted(worker for worker, _, _ in ends) == ["0", "1"], done.stdout
    assert len({weights for _, _, weights in ends}) == 1
    assert all(float(accuracy) > 0.8 for _, accuracy, _ in ends)
