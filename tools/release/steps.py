"""Runs the steps of a release check one by one, and prints how long each took; knows no particular step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["ROOT", "Failed", "run", "walk"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0  # time limit of one command
# Variables of this environment that must not reach a fresh one.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Failed(Exception):
    """A step failed; the text says what went wrong and where."""


def run(
    command: Sequence[str | Path],
    folder: Path,
    *,
    path: Path | None = None,
    expect: int = 0,
    limit_s: float = LIMIT_S,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run ``command`` and return what it printed; ``path`` goes in front of PATH.

    Raises Failed if its exit code is not ``expect``, or if it takes longer than ``limit_s``.
    """
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN and not name.startswith("DDL_")}
    if path is not None:
        own["PATH"] = f"{path}{os.pathsep}{own.get('PATH', '')}"
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=own | dict(environ or {}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        shown = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise Failed(f"{' '.join(words)}: not done after {limit_s:g} s\n{shown}") from None
    if done.returncode != expect:
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}, not {expect}\n{done.stdout}")
    return done.stdout


def walk(steps: Sequence[tuple[str, Callable[[], str]]]) -> int:
    """Run the steps in order, and return the exit code. Each step returns its result in a few words."""
    begun_s = time.monotonic()
    for name, step in steps:
        since_s = time.monotonic()
        try:
            found = step()
        except Failed as error:
            print(f"FAILED  {name}: {error}", flush=True)
            return 1
        print(f"ok      {name}: {found} ({time.monotonic() - since_s:.0f} s)", flush=True)
    print(f"release check passed ({time.monotonic() - begun_s:.0f} s, Python {sys.version.split()[0]})")
    return 0
