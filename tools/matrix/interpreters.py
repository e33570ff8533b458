"""Finds the interpreter of a release of Python on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["interpreter"]


def interpreter(version: str) -> Path | None:
    """Return the path of a Python of ``version``, such as "3.13", with which environments can be made; None if there is none.

    It is looked for under its name on PATH, and among the versions of pyenv, whose own programs on PATH work for some
    versions only.
    """
    return next((path for path in _places(version) if _works(path, version)), None)


def _places(version: str) -> Iterator[Path]:
    named = shutil.which(f"python{version}")
    if named is not None:
        yield Path(named)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    wanted = tuple(map(int, version.split(".")))
    found = [path for path in pyenv.glob("versions/*/bin/python") if _numbers(path)[:2] == wanted]
    yield from sorted(found, key=_numbers, reverse=True)


def _numbers(python: Path) -> tuple[int, ...]:
    """Return the version in the name of the folder of ``python``: versions/3.13.0/bin/python gives (3, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", python.parts[-3])))


def _works(python: Path, version: str) -> bool:
    look = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version
