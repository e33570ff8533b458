"""Runs programs on real processes, started by `ddl run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLES", "PROGRAMS", "SOURCE", "launch", "run_python"]

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"
SOURCE = Path(__file__).parents[1] / "src"


def launch(size: int, program: Path, *args: str, timeout_s: float = 400.0, check: bool = True, **env: str) -> str:
    """Return what the ranks printed, with prefixes; raise AssertionError with all output if the exit code is not 0."""
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(size), sys.executable, str(program), *args]
    done = _run(command, timeout_s, {"PYTHONUNBUFFERED": "1", **env})
    assert not check or done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_python(code: str, *flags: str, timeout_s: float = 240.0, **env: str) -> tuple[int, str]:
    """Return the exit code and the output of an interpreter that runs ``code``."""
    done = _run([sys.executable, *flags, "-c", code], timeout_s, env)
    return done.returncode, done.stdout


def _run(command: list[str], timeout_s: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **env},
    )
