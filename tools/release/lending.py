"""Lends a fresh environment the frameworks that are installed here, because installing them again would take minutes.

None of our own packages is lent: neither ddlcore, nor a plugin, nor a path to the source tree.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from tools.release.steps import ROOT, Failed, run

__all__ = ["lend", "origin"]

OURS = re.compile(r"_*(editable[._a-z]*)?ddl.*|pip(-.*)?|__pycache__", re.IGNORECASE)


def lend(environment: Path, folder: Path) -> str:
    """Add ``folder`` to the path of the fresh ``environment``, with links to all packages here except ours."""
    folder.mkdir()
    lent = [entry for entry in Path(sysconfig.get_path("purelib")).iterdir() if not OURS.fullmatch(entry.name)]
    for entry in lent:
        (folder / entry.name).symlink_to(entry)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    return f"{len(lent)} files and folders"


def origin(python: Path, module: str, folder: Path, limit_s: float = 120.0) -> str:
    """Return the path from which the fresh environment imports ``module``.

    Raises Failed if that is not below ``folder``.
    """
    look = f"import {module}; print('found', {module}.__file__)"
    shown = run([python, "-c", look], folder, limit_s=limit_s)
    place = next(Path(line.partition(" ")[2]) for line in shown.splitlines() if line.startswith("found "))
    if folder not in place.parents or ROOT / "plugins" in place.parents:
        raise Failed(f"{module} comes from {place}, not from a wheel in {folder}")
    return str(place.relative_to(folder))
