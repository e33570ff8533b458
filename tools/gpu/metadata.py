"""Writes package metadata of this tree, so that its plugins are found on a machine where nothing can be installed."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["write_missing"]


def write_missing(root: Path, directory: Path) -> list[str]:
    """Write the metadata of the core and of each plugin that is not installed to ``directory``.

    The metadata are those that pip would write. Return the names of the distributions.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    written = []
    for file in [root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))]:
        project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        try:
            version(project["name"])
        except PackageNotFoundError:
            _write(project, directory)
            written.append(project["name"])
    return written


def _write(project: dict[str, Any], directory: Path) -> None:
    place = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (place / "METADATA").write_text(head, encoding="utf-8")
    groups = []
    for group, points in project.get("entry-points", {}).items():
        groups += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (place / "entry_points.txt").write_text("\n".join(groups) + "\n", encoding="utf-8")
