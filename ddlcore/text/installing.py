"""Write pip commands that install parts of ddl from the same source from which ddlcore itself was installed.

A command such as ``pip install ddl-mine`` asks a package index. If ddlcore was installed from another source, such as a
directory or a repository, the index may not have the plugin, or somebody else may have published another package under
that name. pip records the source of a distribution in ``direct_url.json`` (PEP 610), unless the source was an index or
``--find-links`` was used.
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
_USUAL = ("ddl-shm",)  # what the distributions of ddl need, but for these
_NEEDS: Mapping[str, tuple[str, ...]] = {
    _CORE: (),
    "ddl-dashboard": ("ddl-doctor",),
    "ddl-doctor": (),
    "ddl-horovod": ("ddl-doctor", "ddl-shm"),
    "ddl-prometheus": (),
    "ddl-shm": (),
}
_CLONE = "  # in a clone of ddl"  # a comment: a shell ignores it, so the line can be copied whole
_COMMAND = re.compile(r"pip install [^;`(\n]*")
# A requirement after `pip install` that may be a distribution of ddl, with its extras, version and quotes.
_REQUIREMENT = re.compile(
    r"""(?P<quote>['"]?)(?<![\w./-])(?P<name>ddl[a-z-]*[a-z])(?P<extras>\[[\w,-]+\])?"""
    r"""(?P<version>[=<>!~][\w.+!*,=<>~-]*)?(?![\w./-])(?P=quote)"""
)


def pip_install(requirement: str, *, absolute: bool = False) -> str:
    """Return the command that installs ``requirement``, such as ``ddl-mine`` or ``ddlcore[tune]``, for a message.

    If ``requirement`` is a distribution of ddl, the command uses the source from which ddlcore was installed, see
    ``as_installed``. If ``absolute`` is true, paths in the command are absolute, because the command is for another
    host. This function reads metadata from the disk, so call it only for a text that is shown to the user.
    """
    return as_installed(f"pip install {shlex.quote(requirement)}", absolute=absolute)


def as_installed(text: str, *, absolute: bool = False) -> str:
    """Change the commands ``pip install …`` in ``text`` so that they use the source from which ddlcore was installed.

    Return the changed text. The names of ddl's distributions are replaced, depending on the source of ddlcore:

    - A directory: replaced by the folder of the distribution in this directory, with ``-e`` if the distribution is
      installed in editable mode. If the directory does not exist any more, as after the build of an image: replaced by
      the folder in a clone of ddl, and the command gets a comment that says this.
    - A wheel: replaced by the wheel of the distribution in the same folder. If there is no such wheel: the command uses
      this folder as the only source of wheels, without an index.
    - A repository or an archive of a repository: replaced by the folder of the distribution in it, at the same commit.
    - An index: ``text`` is unchanged.

    If a distribution is already installed and pip has recorded its source, that source is used in place of ddlcore's.
    If distributions of ddl on which they depend are not installed, the command installs them as well.
    If ``absolute`` is true, paths are absolute, because the text is for another host.
    """
    begin = text.find("pip install ")
    if begin < 0:
        return text
    commands = _COMMAND.sub(partial(_with_needed, absolute), text[begin:])
    commands = _REQUIREMENT.sub(partial(_replaced, absolute), commands)
    if _CLONE in commands:
        commands = _COMMAND.sub(_with_comment_at_end, commands.replace(_CLONE, "\0"))
    return text[:begin] + commands


def _with_comment_at_end(command: re.Match[str]) -> str:
    words = command.group().replace("\0", "")
    return f"{words.rstrip()}{_CLONE}{words[len(words.rstrip()) :]}" if "\0" in command.group() else words


def _replaced(absolute: bool, found: re.Match[str]) -> str:
    name, extras, version = found["name"], found["extras"] or "", found["version"] or ""
    return _words(name, extras, version, absolute) or found.group()


def _with_needed(absolute: bool, command: re.Match[str]) -> str:
    """Add what the distributions of ddl in ``command`` need, if it may be missing and an index would be asked for it."""
    words, names = command.group(), [found["name"] for found in _REQUIREMENT.finditer(command.group())]
    needed: list[str] = []
    for name in names:
        if not absolute and _source(name) is not None:  # absolute: nobody knows what the other host has
            continue
        # A distribution that is not of ddl, or comes from an index, keeps its name; a folder of wheels is the only source.
        new = _words(name, "", "", absolute)
        if new is not None and not new.startswith("--no-index"):
            needed += _NEEDS.get(name, _USUAL)
    missing = {one: None for one in needed if one not in names and (absolute or _source(one) is None)}
    end = words.rstrip()
    return f"{' '.join([end, *missing])}{words[len(end) :]}"


def _words(name: str, extras: str, version: str, absolute: bool) -> str | None:
    """Return the arguments of ``pip install`` that install the distribution ``name`` from the right source.

    Return None if the name itself is the right argument. ``extras`` (such as "[tune]") and ``version`` (such as
    "==1.0") are the parts of the requirement after the name, or "".
    """
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
        # In a clone without that folder, or in a folder that is not in a clone, the package is not a part of ddl.
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
    """Return the arguments of ``pip install`` that install the distribution ``name`` by means of the file at ``url``.

    The file is a wheel, a source distribution, or an archive of the repository. ``own`` is the recorded source of
    ``name``. If ``own`` is not empty, ``name`` itself was installed from ``url``. Otherwise ddlcore was installed from
    ``url``, and ``within`` is the folder of ``name`` in the repository. Return None if ``name`` alone is the right
    argument: ``name`` was installed from a package index, and no suitable file of ``name`` lies beside a local file at
    ``url``.
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
        return None  # the distribution was installed from an index
    # The option prevents pip from asking an index, where somebody else may have published a package of that name.
    folder = shlex.quote(_shown(theirs.parent, absolute))
    return f"--no-index --find-links {folder} {shlex.quote(name + extras + version)}"


def _fragment(subdirectory: str) -> str:
    return f"#subdirectory={subdirectory}" if subdirectory else ""


@cache
def _source(name: str) -> Mapping[str, Any] | None:
    """Return the record of pip about the source of the distribution ``name``.

    The result is {} if the source was an index, and None if the distribution is not installed. If ddlcore is not
    installed but is imported from a directory on the module path, the source of ddlcore is this directory.
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
    """Return ``path`` as text, relative to the working directory if ``path`` is inside this directory.

    Return the whole path if it is not inside, or if ``absolute`` is true because the text is for another host.
    """
    try:
        relative = path.resolve().relative_to(Path(os.getcwd()).resolve())
    except (ValueError, OSError):
        return str(path)
    if absolute:
        return str(path)
    return "." if relative == Path() else f"./{relative}"
