"""The files that a training leaves contain only TensorFlow's operations.

They load and predict where ddl is not installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from plugins.ddl_torch.tests.launching import launch

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(540)
def test_what_is_left_predicts_without_ddl(tmp_path: Path) -> None:
    """SavedModels, .keras files, a frozen graph and a checkpoint predict without ddl.

    The SavedModels are those of Keras 3, tf_keras and a tape; the frozen graph and the checkpoint are those of a
    session.
    """
    launch(2, PROGRAMS / "exports.py", str(tmp_path), timeout_s=480)
    alone = [sys.executable, "-I", "-S", str(PROGRAMS / "inference.py"), str(tmp_path), sysconfig.get_path("purelib")]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ("frozen", "checkpoint", "whole.keras", "keras", "tf_keras", "tape")
    assert done.stdout.splitlines() == [f"{way} predicts" for way in ways]
