"""``ddl`` as a user starts it: in a process of its own, from this source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

__all__ = ["DDL", "Begin", "Ddl", "environment"]

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
