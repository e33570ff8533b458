"""Describes a library that a plugin uses: the version that is loaded or installed, and the features of that version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

__all__ = ["Library", "installed_version", "version_numbers"]


@dataclass(frozen=True)
class Library:
    """The description of a library that this process has loaded.

    ``facts`` are further facts about the library, such as its path and its features. They are shown to users.
    """

    name: str
    version: int  # the library's own version code, above 0
    facts: Mapping[str, str] = field(default_factory=dict)  # shown to users, such as the path and the features


def installed_version(module: str, *distributions: str) -> str:
    """Return the version of the installed distribution that contains the top-level ``module``. Imports nothing of it.

    The function first looks for distributions that are called as the module or as one of ``distributions``. If there is
    none, but the module exists, the function reads the metadata of all distributions, which takes a third of a second.
    The result is "" if the module does not exist, or if no distribution contains it.
    """
    try:
        if find_spec(module) is None:
            return ""
    except (ImportError, ValueError):  # a finder of someone else, or a module that was made by hand
        return ""
    return _first_version([module, *distributions]) or _version_of_owner(module)


def _first_version(names: Iterable[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _version_of_owner(module: str) -> str:
    """Return the version of the distribution that has a file or a folder called ``module``, or ""."""
    for distribution in metadata.distributions():
        if any(file.parts[0].partition(".")[0] == module for file in distribution.files or ()):
            return distribution.version
    return ""


def version_numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """Return the first ``count`` numbers of a version, so that versions can be compared: 2.10.0+cu128 gives (2, 10)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:count])
