"""Write commands that install parts of ddl so that they fit the way in which ddlcore itself was installed here.

A command such as ``pip install ddl-mine`` asks an index of packages. If ddlcore came from somewhere else, the index may
not have the plugin, or somebody else may have published another package under that name. pip records where a
distribution came from (PEP 610, ``direct_url.json``), unless it came from an index or by ``--find-links``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

# A requirement that may be one of our distributions, with its extras and quotes, after `pip install`.
_REQUIREMENT = re.compile(
    r"""(?P<quote>['"]?)(?<![\w./-])(?P<name>ddl[a-z-]*[a-z])(?P<extras>\[[\w,-]+\])?(?![\w./-])(?P=quote)"""
)


def pip_install(requirement: str) -> str:
    """Return the command that installs ``requirement``, such as ``ddl-mine`` or ``ddlcore[tune]``."""
    return as_installed(f"pip install {shlex.quote(requirement)}")


def as_installed(text: str) -> str:
    """Return ``text``, in which the commands ``pip install …`` name our distributions where ddlcore came from.

    - From a directory: the plugin's folder in it.
    - From a wheel: the plugin's wheel beside it.
    - From a repository: the plugin's folder in it, at the same commit.
    - From an index, or if that folder or wheel is not on this machine: ``text`` is unchanged.
    """
    begin = text.find("pip install ")
    if begin < 0:
        return text
    return text[:begin] + _REQUIREMENT.sub(_replaced, text[begin:])


def _replaced(found: re.Match[str]) -> str:
    name, extras = found["name"], found["extras"] or ""
    place = _place(name)
    return found.group() if place is None else shlex.quote(place.replace("{extras}", extras))


def _place(name: str) -> str | None:
    """Return what pip has to be given to install ``name`` from where ddlcore came; ``{extras}`` stands for extras.

    Returns None if that is the name itself.
    """
    source = _source()
    url = urlsplit(str(source.get("url", "")))
    if "dir_info" in source and url.scheme == "file":
        root = Path(unquote(url.path))
        folder = root if name == "ddlcore" else root / "plugins" / name.replace("-", "_")
        return f"{_shown(folder)}{{extras}}" if (folder / "pyproject.toml").is_file() else None
    if "archive_info" in source:
        ours = PurePosixPath(unquote(url.path))
        theirs = ours.name.replace("ddlcore-", f"{name.replace('-', '_')}-", 1)
        if url.scheme == "file":
            wheel = Path(ours.parent) / theirs
            return f"{_shown(wheel)}{{extras}}" if wheel.is_file() else None
        return f"{name}{{extras}} @ {url._replace(path=str(ours.with_name(theirs))).geturl()}"
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        subdirectory = "" if name == "ddlcore" else f"#subdirectory=plugins/{name.replace('-', '_')}"
        return f"{name}{{extras}} @ {vcs['vcs']}+{url.geturl()}@{vcs['commit_id']}{subdirectory}"
    return None


@cache
def _source() -> dict[str, Any]:
    """Return what pip has recorded about the origin of ddlcore; empty if it came from an index."""
    try:
        text = distribution("ddlcore").read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (PackageNotFoundError, OSError, ValueError):  # started from a folder, or not installed by pip
        return {}
    return found if isinstance(found, dict) else {}


def _shown(path: Path) -> str:
    """Return ``path`` relative to the working directory if it is below it, else the whole path."""
    try:
        relative = path.resolve().relative_to(Path(os.getcwd()).resolve())
    except (ValueError, OSError):
        return str(path)
    return "." if relative == Path() else f"./{relative}"
