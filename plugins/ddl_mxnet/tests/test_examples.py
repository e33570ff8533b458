"""The examples learn and resume, and processes train as one does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from plugins.ddl_mxnet.tests.launching import EXAMPLES, PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def facts(shown: str) -> tuple[float, set[str]]:
    """Test accuracy in %, and the digests of all ranks' parameters."""
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    return float(accuracy), set(re.findall(r"parameters (\w{12})", shown))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "resume"), [("mxnet_digits.py", ("--resume",)), ("mxnet_module_digits.py", ("--resume", "8"))]
)
def test_digits(example: str, resume: tuple[str, ...], tmp_path: Path) -> None:
    """Two ranks learn, agree to the last bit, and a checkpoint goes on with three."""
    checkpoint = str(tmp_path / "digits")
    shown = launch(2, EXAMPLES / example, "--checkpoint", checkpoint)
    accuracy, digests = facts(shown)
    assert accuracy >= 95.0, shown
    assert len(re.findall(r"rank \d of 2: parameters", shown)) == 2, shown
    assert len(digests) == 1, shown
    assert len(re.findall(r"epoch 8: loss", shown)) == 1, "one rank reports"
    shown = launch(3, EXAMPLES / example, "--checkpoint", checkpoint, *resume, "--epochs", "9")
    assert re.findall(r"epoch (\d+):", shown) == ["9"], shown
    resumed, digests = facts(shown)
    assert resumed >= 95.0, shown
    assert len(digests) == 1, shown


def test_processes_agree_and_steady_steps_are_quiet() -> None:
    """1 and 2 ranks, a network whose shapes come late: ten steps to the same, and then no message to the coordinator."""
    found = {
        size: [json.loads(line) for line in re.findall(r"found (\{.*\})", launch(size, PROGRAMS / "quiet.py"))]
        for size in (1, 2)
    }
    one, (first, second) = found[1][0], found[2]
    assert first["last"] == second["last"]
    for expected, values, others in zip(one["values"], first["values"], second["values"], strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-5)
        assert values == others
    for rank in (first, second):
        assert rank["batches_replayed"] >= 30
        assert [rank["control_messages"], rank["batches_negotiated"]] == [0, 0]
