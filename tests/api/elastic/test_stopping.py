"""A signal that asks for a stop between two worlds stops the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "stopping.py"


@pytest.mark.processes
def test_a_signal_between_two_worlds() -> None:
    """It neither ends the process nor gets lost: all ranks stop at the same step, and the job ends as one that stopped."""
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "--min-np", "1", sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 85, done.stdout + done.stderr
    assert done.stdout.count("stopped after True") == 2, done.stdout + done.stderr
