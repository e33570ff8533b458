"""Every package of the tree is laid out alike, and everything it depends on is pinned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddlcore.config.file import read_toml
from tests.architecture.source import ROOT

PACKAGES = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]


def project(folder: Path) -> Any:
    return read_toml(folder / "pyproject.toml")["project"]


def plain(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_dependencies_are_pinned(folder: Path) -> None:
    """constraints.txt has a line for each third-party requirement, so that two installs are alike."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line) for line in lines if line and not line.startswith("#")}
    own = {plain(project(package)["name"]) for package in PACKAGES}
    wanted = list(project(folder)["dependencies"])
    for extra in project(folder).get("optional-dependencies", {}).values():
        wanted += extra
    assert sorted({plain(requirement) for requirement in wanted} - pinned - own) == []


@pytest.mark.parametrize("folder", PACKAGES[1:], ids=lambda folder: folder.name)
def test_plugins_are_laid_out_alike(folder: Path) -> None:
    """Knowing one plugin is knowing all: README.md, LICENSE, src/NAME/{plugin.py,py.typed}, tests, an entry point."""
    source = folder / "src" / folder.name
    wanted = [folder / "README.md", folder / "LICENSE", folder / "tests", source / "plugin.py", source / "py.typed"]
    assert [str(path.relative_to(ROOT)) for path in wanted if not path.exists()] == []
    metadata = project(folder)
    assert metadata["name"] == folder.name.replace("_", "-")
    assert f"{folder.name}.plugin" in metadata["entry-points"]["ddlcore.plugins.v2"].values()
    assert metadata["requires-python"] == project(ROOT)["requires-python"]
