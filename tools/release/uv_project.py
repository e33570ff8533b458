"""Checks that a project of uv can use the packages of a clone, as the documentation of the installation says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.environment import of_pip
from tools.release.steps import ROOT, Failed, run

__all__ = ["uv_project"]

_PROJECT = """\
[project]
name = "training"
version = "0"
requires-python = ">={}.{}"
"""
_SCRIPT = """\
import sys
import numpy as np
import ddlcore as ddl

ddl.init()
print(ddl.allreduce(np.ones(1), op=ddl.Sum)[0], sys.prefix)
"""


def uv_project(uv: Path, folder: Path) -> str:
    """Make a project in ``folder``, add packages of the clone to it, and start two ranks by `uv run`.

    ``uv`` is the program. Raises Failed if a command fails, or if the ranks do not use the environment of the project.
    """
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PROJECT.format(*sys.version_info), encoding="utf-8")
    (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
    environ = of_pip(Path(sys.executable))
    packages = [os.path.relpath(one, folder) for one in (ROOT, ROOT / "plugins/ddl_shm")]
    options = ("--quiet", "--python", sys.executable, "--constraints", ROOT / "constraints.txt")
    run([uv, "add", *options, *packages], folder, environ=environ)
    shown = run([uv, "run", "--quiet", "ddl", "run", "-np", "2", "python", "train.py"], folder, environ=environ)
    lines = sorted(line for line in shown.splitlines() if line.startswith("["))
    expected = [f"[{rank}] 2.0 {folder / '.venv'}" for rank in range(2)]
    if lines != expected:
        raise Failed(f"the ranks of `uv run` printed {lines}, not {expected}:\n{shown}")
    return "the ranks use the environment of the project"
