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
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

_CORE = "ddlcore"
_CLONE = "  # in a clone of ddl"  # a comment: a shell ignores it, so the line can be copied whole
_COMMAND = re.compile(r"pip install [^;`(\n]*")
# A requirement that may be one of our distributions, with its extras, version and quotes, after `pip install`.
_REQUIREMENT = re.compile(
    r"""(?P<quote>['"]?)(?<![\w./-])(?P<name>ddl[a-z-]*[a-z])(?P<extras>\[[\w,-]+\])?"""
    r"""(?P<version>[=<>!~][\w.+!*,=<>~-]*)?(?![\w./-])(?P=quote)"""
)


def pip_install(requirement: str, *, absolute: bool = False) -> str:
    """Return the command that installs ``requirement``, such as ``ddl-mine`` or ``ddlcore[tune]``, for a message.

    Our distributions are named as ``as_installed`` does it; other requirements stay as they are. ``absolute``: the
    command is for another host, so that its paths are absolute. It reads metadata from the disk, so call it only for a
    text that is shown.
    """
    return as_installed(f"pip install {shlex.quote(requirement)}", absolute=absolute)


def as_installed(text: str, *, absolute: bool = False) -> str:
    """Return ``text``, in which the commands ``pip install …`` name our distributions where ddlcore came from.

    - From a directory: the distribution's folder in it, with ``-e`` if it is installed in editable mode. If that
      directory is gone, as after the build of an image: the folder within a clone, and a comment that says so.
    - From a wheel: the wheel beside it. If there is none: the folder of wheels, without an index.
    - From a repository or an archive of it: the distribution's folder in it, at the same commit.
    - From an index: ``text`` is unchanged.

    What is installed already is named by its own source if pip has recorded that, and not by that of ddlcore.
    ``absolute``: the text is for another host, so that paths are absolute.
    """
    begin = text.find("pip install ")
    if begin < 0:
        return text
    commands = _REQUIREMENT.sub(partial(_replaced, absolute), text[begin:])
    if _CLONE in commands:
        commands = _COMMAND.sub(_with_comment_at_end, commands.replace(_CLONE, "\0"))
    return text[:begin] + commands


def _with_comment_at_end(command: re.Match[str]) -> str:
    words = command.group().replace("\0", "")
    return f"{words.rstrip()}{_CLONE}{words[len(words.rstrip()) :]}" if "\0" in command.group() else words


def _replaced(absolute: bool, found: re.Match[str]) -> str:
    name, extras, version = found["name"], found["extras"] or "", found["version"] or ""
    return _words(name, extras, version, absolute) or found.group()


def _words(name: str, extras: str, version: str, absolute: bool) -> str | None:
    """Return what pip has to be given to install ``name``; None if that is the name itself."""
    own, core = _source(name), _source(_CORE)
    source = own or core
    if not source:
        return None
    url = urlsplit(str(source.get("url", "")))
    within = "" if name == _CORE else f"plugins/{name.replace('-', '_')}"
    if "dir_info" in source and url.scheme == "file":
        root = Path(unquote(url.path)) / str(source.get("subdirectory", ""))
        folder = root if own else root / within
        if (folder / "pyproject.toml").is_file():
            editable = "-e " if own and source["dir_info"].get("editable") else ""
            return editable + shlex.quote(_shown(folder, absolute) + extras)
        # A clone without that folder, or a folder that is not in a clone: the package is somebody else's.
        if own is not None and (not own or (within and folder.parent.name != "plugins")):
            return None
        if not own and (root / "pyproject.toml").is_file():
            return None
        return shlex.quote((f"./{within}" if within else ".") + extras) + _CLONE
    if "archive_info" in source:
        return _from_archive(url, name, extras, version, within, own, absolute)
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        inside = _fragment(str(source.get("subdirectory", "")) if own else within)
        return shlex.quote(f"{name}{extras} @ {vcs['vcs']}+{url.geturl()}@{vcs['commit_id']}{inside}")
    return None


def _from_archive(
    url: SplitResult,
    name: str,
    extras: str,
    version: str,
    within: str,
    own: Mapping[str, Any] | None,
    absolute: bool,
) -> str | None:
    """Return what pip has to be given if ddlcore, or with ``own`` the distribution itself, came from a file at ``url``.

    The file is a wheel, a source distribution, or an archive of the repository.
    """
    path = Path(unquote(url.path))
    stem = (name if own else _CORE).replace("-", "_")
    if not path.name.startswith(f"{stem}-") or (path.suffix != ".whl" and not path.name.endswith(".tar.gz")):
        inside = _fragment("" if own else within)
        return shlex.quote(f"{name}{extras} @ {url.geturl()}{inside}")
    theirs = path.with_name(path.name.replace(f"{stem}-", f"{name.replace('-', '_')}-", 1))
    if url.scheme != "file":
        return shlex.quote(f"{name}{extras} @ {url._replace(path=str(theirs)).geturl()}")
    if theirs.is_file() and version in ("", f"=={theirs.name.removesuffix('.tar.gz').split('-')[1]}"):
        return shlex.quote(_shown(theirs, absolute) + extras)
    if own == {}:
        return None  # it came from an index itself
    # The option keeps pip from asking an index, where somebody else may have published that name.
    folder = shlex.quote(_shown(theirs.parent, absolute))
    return f"--no-index --find-links {folder} {shlex.quote(name + extras + version)}"


def _fragment(subdirectory: str) -> str:
    return f"#subdirectory={subdirectory}" if subdirectory else ""


@cache
def _source(name: str) -> Mapping[str, Any] | None:
    """Return what pip has recorded about the origin of a distribution.

    Empty if it came from an index; None if it is not installed. The origin of a ddlcore that is not installed, but
    found on the module path, is the directory that it is in.
    """
    try:
        text = distribution(name).read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except PackageNotFoundError:
        here = Path(__file__).resolve().parents[2]
        return {"url": here.as_uri(), "dir_info": {}} if name == _CORE and (here / "pyproject.toml").is_file() else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(path: Path, absolute: bool) -> str:
    """Return ``path`` relative to the working directory if it is below it, otherwise and for another host whole."""
    try:
        relative = path.resolve().relative_to(Path(os.getcwd()).resolve())
    except (ValueError, OSError):
        return str(path)
    if absolute:
        return str(path)
    return "." if relative == Path() else f"./{relative}"
