"""Gradients in graphs and sessions, on processes, because threads would share TensorFlow's pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.ddl_tf.tests.launching import LEAN

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs" / "gradients.py"
CHECKS = (
    "tape_eager",
    "tape_function",
    "weights_of_rows",
    "weights_that_are_none",
    "weights_in_replay",
    "v1_optimizer",
    "v1_passes",
    "replay",
    "kept",
    "let_go",
    "kinds",
    "differing",
    "shuffled",
    "called_twice",
    "branches",
    "broadcasts",
)


@pytest.mark.long
def test_two_processes_reduce_as_one_would() -> None:
    """All checks of the program pass: values, no control message in replay, shuffled runs, errors, broadcasts.

    The program makes 200 shuffled runs on one thread.
    """
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", sys.executable, str(PROGRAM)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
        env={**os.environ, **LEAN},
    )
    assert done.returncode == 0, done.stdout
    missing = [check for check in CHECKS if done.stdout.count(f"held {check}\n") != 2]
    assert not missing, f"{missing}\n{done.stdout}"
