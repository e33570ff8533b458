"""Builds the distributions, and inspects the contents of their wheels."""

from __future__ import annotations

import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import Parser
from pathlib import Path

from tools.environment import of_pip
from tools.release.steps import ROOT, Failed, run

__all__ = ["build", "inspect", "outside", "sources"]

# Files that a wheel may have beside its package; each is explained where it is made.
BESIDE = {
    "ddl_horovod": {"horovod"},
    "ddl_mxnet": {"_ddl_mxnet_numpy.py", "ddl_mxnet.pth"},
    "ddl_torch": {"ddl_torch_backend"},
}
REQUIRED = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Description-Content-Type")
LEFT_BEHIND = ("__pycache__", ".pyc", ".orig", ".rej", ".swp", ".DS_Store", "/.venv", "/dist/", "/build/", ".egg-info")
STRAY = (*LEFT_BEHIND, "/tests/", "/test_")
LARGEST_BYTES = 2 << 20  # our packages contain only source code


def sources() -> list[Path]:
    """Return the folders of our own distributions."""
    return [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def outside() -> list[Path]:
    """Return the folders of the example plugins, which are written from the documentation alone."""
    return sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))


def build(folders: Sequence[Path], into: Path) -> str:
    """Build the source distribution of each folder, and from that the wheel.

    Two are built at a time, because each waits for its environment part of its time.
    """
    with ThreadPoolExecutor(2) as pool:
        made = [path for paths in pool.map(_build, folders, [into] * len(folders)) for path in paths]
    return f"{len(made)} files of {len(folders)} distributions"


def _build(source: Path, into: Path) -> list[Path]:
    with tempfile.TemporaryDirectory(dir=into) as folder:
        command: list[str | Path] = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", folder, source]
        run(command, ROOT, environ=of_pip(Path(sys.executable)))
        made = sorted(Path(folder).iterdir(), key=lambda path: path.suffix)
        if [path.suffix for path in made] != [".gz", ".whl"]:
            raise Failed(f"{source}: an sdist and a wheel were expected, not {[path.name for path in made]}")
        inspect_source(made[0])
        return [path.rename(into / path.name) for path in made]


def inspect_source(sdist: Path) -> None:
    """Raise Failed if a source distribution lacks its licence, README or tests, or contains stray files."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    wrong = [f"no {name}" for name in ("LICENSE", "README.md", "pyproject.toml", "PKG-INFO") if name not in names]
    if not any(name.startswith("tests/test_") or "/test_" in name for name in names):
        wrong.append("no tests")
    wrong += [f"stray: {name}" for name in names if any(mark in f"/{name}" for mark in LEFT_BEHIND)]
    if wrong:
        raise Failed(f"{sdist.name}: {'; '.join(wrong[:5])}")


def inspect(wheel: Path) -> str:
    """Return the number of files. Raises Failed for missing metadata, licence or typing marker, and for stray files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = _metadata(archive, names)
        wrong = [f"no {field}" for field in REQUIRED if not metadata[field]]
        wrong += [f"no requirement {word}" for word in _unmet(wheel, metadata)]
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


def _unmet(wheel: Path, metadata: Message) -> list[str]:
    """Return what is missing: all distributions but the core must require ddlcore within one major version, or their own."""
    if wheel.name.startswith("ddlcore-"):
        return []
    bounds = [
        row for row in metadata.get_all("Requires-Dist", []) if row.startswith("ddlcore") and "extra ==" not in row
    ]
    own = f"ddlcore=={metadata['Version']}"
    return [] if any(row == own or ("<" in row and ">=" in row) for row in bounds) else ["ddlcore>=…,<…"]


def _metadata(archive: zipfile.ZipFile, names: list[str]) -> Message:
    name = next(name for name in names if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())
