"""Checks that PyPI alone can satisfy `make venv` and `make demo`, on every Python that the packages support.

A package index on this machine's disk, or a wheel of a framework that somebody has put there, hides a version that
PyPI's own packages cannot use together. Nothing is downloaded but the metadata of packages, and nothing is installed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tools.environment import PYPI_ALONE
from tools.release.steps import ROOT, Failed, run

__all__ = ["PYTHONS", "requirements", "resolve"]

# With the patch releases of Ubuntu 22.04, Debian 12, Ubuntu 24.04 and Debian 13, because packages may require a later one.
PYTHONS = ("3.10.12", "3.11.2", "3.12.3", "3.13.5")
# What makes the environment of each command: the Makefile's own recipe, so that no list of packages stands here.
TARGETS = {"make venv": ".venv/.made", "make demo": ".venv-demo/.made"}


def requirements(recipe: str) -> list[str]:
    """Return the arguments of the first installation by uv in ``recipe``, which is the output of `make --dry-run`."""
    found = re.search(r"^\S+ tools/environment\.py \S+ (.*)$", recipe, re.MULTILINE)
    if found is None:
        raise Failed(f"no line of the recipe installs anything:\n{recipe}")
    return shlex.split(found[1])


def resolve(uv: Path, folder: Path) -> str:
    """Check for each command and each Python that PyPI has a set of versions. Return what was checked, in words.

    ``uv`` is the program. ``folder`` is created; no package is installed into it. Raises Failed with the conflict if
    there is no solution.
    """
    folder.mkdir(parents=True)
    for name, target in TARGETS.items():
        wanted = requirements(run(["make", "--dry-run", "--always-make", target], ROOT))
        for python in PYTHONS:
            options = ["--quiet", "--dry-run", "--target", str(folder), "--python-version", python]
            try:
                run([uv, "pip", "install", *options, *wanted], ROOT, environ=PYPI_ALONE)
            except Failed as error:
                raise Failed(f"`{name}` on Python {python}, with packages of PyPI only: {error}") from None
    return f"{', '.join(TARGETS)} on Python {', '.join(PYTHONS)}"
