"""Lends a fresh environment the frameworks of the environment that this runs in: to install them again would take minutes.

Of ours nothing is lent: neither ddlcore nor a plugin of it, nor a path to the source tree.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from tools.release.steps import ROOT, Failed, run

__all__ = ["lend", "origin"]

OURS = re.compile(r"_*(editable[._a-z]*)?ddl.*|pip(-.*)?|__pycache__", re.IGNORECASE)


def lend(environment: Path, folder: Path) -> str:
    """Puts ``folder`` on the path of the fresh ``environment``, with links to all that is installed here but ours."""
    folder.mkdir()
    lent = [entry for entry in Path(sysconfig.get_path("purelib")).iterdir() if not OURS.fullmatch(entry.name)]
    for entry in lent:
        (folder / entry.name).symlink_to(entry)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    return f"{len(lent)} files and folders"


def origin(python: Path, module: str, folder: Path, limit_s: float = 120.0) -> str:
    """Where the fresh environment imports ``module`` from. Raises Failed where that is not below ``folder``."""
    look = f"import {module}; print('found', {module}.__file__)"
    shown = run([python, "-c", look], folder, limit_s=limit_s)
    place = next(Path(line.partition(" ")[2]) for line in shown.splitlines() if line.startswith("found "))
    if folder not in place.parents or ROOT / "plugins" in place.parents:
        raise Failed(f"{module} comes from {place}, not from a wheel in {folder}")
    return str(place.relative_to(folder))
