"""Builds the distributions, and looks at what is in their wheels."""

from __future__ import annotations

import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from tools.release.steps import ROOT, Failed, run

__all__ = ["build", "inspect", "outside", "sources"]

# Beside its package a wheel may bring these; each is explained where it is made.
BESIDE = {"ddl_mxnet": {"_ddl_mxnet_numpy.py", "ddl_mxnet.pth"}}
REQUIRED = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Description-Content-Type")
STRAY = ("__pycache__", ".pyc", ".orig", ".rej", ".swp", ".DS_Store", "/tests/", "/test_")
LARGEST_BYTES = 2 << 20  # ours is source


def sources() -> list[Path]:
    """The folders of our own distributions."""
    return [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def outside() -> list[Path]:
    """The folders of the example plugins, which are built from the documentation alone."""
    return sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))


def build(source: Path, into: Path) -> str:
    """Source distribution and, from that, the wheel."""
    before = set(into.glob("*"))
    run([sys.executable, "-m", "build", "--outdir", into, source], ROOT)
    made = sorted(path.name for path in set(into.glob("*")) - before)
    if len(made) != 2:
        raise Failed(f"{source}: an sdist and a wheel were expected, not {made}")
    return " ".join(made)


def inspect(wheel: Path) -> str:
    """The number of files. Raises Failed for missing metadata, licence or typing marker, and for stray files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = _metadata(archive, names)
        wrong = [f"no {field}" for field in REQUIRED if not metadata[field]]
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        package = wheel.name.split("-")[0]
        if f"{package}/py.typed" not in names:
            wrong.append(f"no {package}/py.typed")
        if not any(name.startswith(f"{info}/licenses/LICENSE") for name in names):
            wrong.append("no licence")
        if not metadata.get_payload():
            wrong.append("no description")
        elsewhere = [
            name for name in names if name.partition("/")[0] not in {package, info} | BESIDE.get(package, set())
        ]
        stray = [name for name in names if any(mark in f"/{name}" for mark in STRAY) and "/templates/" not in name]
        large = [item.filename for item in archive.infolist() if item.file_size > LARGEST_BYTES]
    for what, found in (("outside its package", elsewhere), ("stray", stray), ("too large", large)):
        if found:
            wrong.append(f"{what}: {', '.join(found[:5])}")
    if wrong:
        raise Failed(f"{wheel.name}: {'; '.join(wrong)}")
    return f"{len(names)} files"


def _metadata(archive: zipfile.ZipFile, names: list[str]) -> Message:
    name = next(name for name in names if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())
