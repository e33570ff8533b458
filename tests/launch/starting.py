"""``ddl`` as a user starts it: in a process of its own, from this source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

__all__ = ["DDL", "Begin", "Ddl", "environment", "ranks_of", "ranks_that_wrote"]

ROOT = Path(__file__).resolve().parents[2]
DDL = (sys.executable, "-m", "ddlcore.launch")


class Ddl(Protocol):
    """``ddl(*arguments)``: runs it to its end. Keyword ``env`` is added to the environment."""

    def __call__(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]: ...


class Begin(Protocol):
    """``begin(*arguments)``: starts it and returns at once."""

    def __call__(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]: ...


def environment(extra: dict[str, str] | None) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def ranks_of(label: str) -> set[int]:
    """Returns the ranks before a line of ``ddl run``: "0-2,5" is 0, 1, 2 and 5."""
    ends = [[int(end) for end in part.split("-")] for part in label.split(",")]
    return {rank for part in ends for rank in range(part[0], part[-1] + 1)}


def ranks_that_wrote(words: str, told: str) -> set[int]:
    """Returns the ranks before the lines with ``words`` in what ``ddl run`` has told.

    Equal errors of several ranks are shown as one or apart, depending on when they arrive.
    """
    labels = re.findall(rf"^\[([0-9,-]+)\] .*{re.escape(words)}", told, re.MULTILINE)
    return {rank for label in labels for rank in ranks_of(label)}
