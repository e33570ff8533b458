"""Runs programs on real processes with `ddl run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLES", "LEAN", "PROGRAMS", "launch"]

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"
ABSENT = Path(__file__).parent / "absent"
# Keras imports matplotlib and scikit-learn where they are installed, which takes as long as importing TensorFlow itself.
# These variables keep both from programs that use neither.
LEAN = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ABSENT), os.environ.get("PYTHONPATH", "")))),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def launch(size: int, program: Path, *args: str, timeout_s: float = 400.0, check: bool = True) -> str:
    """Return what the ranks printed, with its prefixes.

    Raises AssertionError with all output if the exit code is not 0.
    """
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(size), sys.executable, str(program), *args]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **LEAN},
    )
    assert not check or done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
