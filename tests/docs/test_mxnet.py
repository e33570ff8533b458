"""The commands of docs/mxnet.md learn the digits, and go on from their checkpoints."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/mxnet.md").read_text()
COMMANDS = re.findall(r"^ddl run (.*--checkpoint .*)$", PAGE, re.MULTILINE)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="MXNet is not installed"),
]


def ran(command: str, folder: Path) -> str:
    """What ``ddl run`` and the ranks printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_mxnet/src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 2], ids=["gluon", "module"])
def test_digits(first: int, tmp_path: Path) -> None:
    """Two ranks learn, agree to the last bit, and a checkpoint goes on with three."""
    assert len(COMMANDS) == 4
    for command, epochs in zip(COMMANDS[first : first + 2], (range(1, 9), range(9, 10))):
        size = int(command.split()[1])
        shown = ran(command.replace("/tmp/", f"{tmp_path}/"), ROOT)
        (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
        assert float(accuracy) >= 95.0, shown
        digests = re.findall(rf"rank \d of {size}: parameters (\w{{12}})", shown)
        assert len(digests) == size, shown
        assert len(set(digests)) == 1, shown
        assert re.findall(r"epoch (\d+): loss", shown) == [str(epoch) for epoch in epochs], "one rank reports"
