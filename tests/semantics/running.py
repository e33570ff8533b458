"""Runs a module of this folder in a process of its own, as the tests here do; knows neither ddl nor torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

__all__ = ["WORLDS_NEED", "run_module"]

WORLDS_NEED = "worlds of processes are forked, which needs Linux"


def run_module(name: str, *arguments: str, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """(the lines of JSON that it printed, what else it said); whatever it started ends with it."""
    command = [sys.executable, "-m", f"tests.semantics.{name}", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DDL_")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"spec"')]  # Transformers prints others
    return lines, f"{' '.join(command)}\nended with {process.returncode}\n{err}"
