"""Runs the steps of a release check, and prints how long each took; knows no particular step."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["ROOT", "Failed", "Lane", "run", "walk"]

ROOT = Path(__file__).resolve().parents[2]
# Steps in order, each with its name.
Lane = list[tuple[str, Callable[[], str]]]
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


def walk(stages: Sequence[Sequence[Lane]]) -> int:
    """Run the stages one after the other, the lanes of a stage side by side, and return the exit code.

    Each step returns its result in a few words. After a step has failed, no other begins.
    """
    begun_s = time.monotonic()
    failed = threading.Event()
    for lanes in stages:
        with ThreadPoolExecutor(len(lanes)) as pool:
            for _ in pool.map(_walk, lanes, [failed] * len(lanes)):
                pass
    if not failed.is_set():
        print(f"release check passed ({time.monotonic() - begun_s:.0f} s, Python {sys.version.split()[0]})")
    return int(failed.is_set())


def _walk(lane: Lane, failed: threading.Event) -> None:
    for name, step in lane:
        if failed.is_set():
            return
        since_s = time.monotonic()
        try:
            found = step()
        except BaseException as error:
            failed.set()
            if not isinstance(error, Failed):
                raise
            print(f"FAILED  {name}: {error}", flush=True)
            return
        print(f"ok      {name}: {found} ({time.monotonic() - since_s:.0f} s)", flush=True)
