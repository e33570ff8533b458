"""Runs programs on real processes, started by `ddl run` or by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["EXAMPLES", "PROGRAMS", "launch", "together"]

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"


def launch(
    size: int,
    program: Path,
    *args: str,
    timeout_s: float = 400.0,
    check: bool = True,
    env: Mapping[str, str] | None = None,  # in addition to the variables of this process
    options: Sequence[str] = (),  # of ddl run
) -> str:
    """Return what the ranks printed, with prefixes; raise AssertionError with all output if the exit code is not 0."""
    checks = {"DDL_VERIFY_EVERY": "10"} if EXAMPLES in program.parents else {}  # their ranks train one model
    run = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(size), *options]
    command = [*run, sys.executable, str(program), *args]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **checks, **(env or {})},
    )
    assert not check or done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def together(
    commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None, timeout_s: float = 150.0
) -> list[tuple[int, str]]:
    """Run all ``commands`` at the same time. Return the exit code and the output of each.

    ``env``: the variables of the processes, by default those of this one. ``timeout_s``: of each command, after which all
    are killed and TimeoutExpired is raised.
    """
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        shown = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(40)
    return [(process.returncode, text) for process, text in zip(started, shown)]
