"""The core's list of private names is complete; and what a list must have, and when a name counts as gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlcore.contracts.library import installed_version
from tests.architecture.source import ROOT
from tests.private_names import check_private_names, private_names

# The names that are not public and that the core uses: the first and the last release in which they were found.
NAMES = {"_thread.RLock._is_owned": "Python 3.10 to 3.14", "threading._register_atexit": "Python 3.10 to 3.14"}
# Python documents these.
OURS = {
    "_current_frames",
    "_exit",
    "_is_gil_enabled",
    "_replace",
    "_thread.LockType",
    "_thread.allocate_lock",
    "_thread.get_ident",
}
SOURCE = """\
import os
from birds._flight import Wing
from birds import fly

class Nest:
    def __init__(self, eggs):
        self._eggs = eggs
        self._count = eggs._shells + self._eggs

    def _open(self):
        return getattr(fly, "_feather", None), self._open(), os.path._joinrealpath
"""
GIVEN = {"os": __import__("os")}


def package(folder: Path) -> Path:
    """Write a package that uses names of others, and return its folder."""
    source = folder / "nests"
    source.mkdir(exist_ok=True)
    (source / "nest.py").write_text(SOURCE)
    return source


def test_names_of_others_are_found(tmp_path: Path) -> None:
    """Names that the package defines itself are none of a library."""
    assert private_names(package(tmp_path)) == {"_shells", "_feather", "birds._flight.Wing", "_joinrealpath"}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"os.path._joinrealpath": "numpy 0 to 0.1"}, "a later release is installed: ['numpy 0 to 0.1']"),
        ({}, "not in the list of private names: ['_joinrealpath']"),
        ({"os.path._joinrealpath": "numpy 1 to 9", "os._wings": "numpy 1 to 9"}, "and not used: ['os._wings']"),
        ({"os.path._joinrealpath.way": "numpy 1 to 9"}, "installed release: ['os.path._joinrealpath.way: found in numpy 1 to 9']"),
        ({"vars(os.path)['_joinrealpath'].way": "numpy 1 to 9"}, "['vars(os.path)['_joinrealpath'].way"),
    ],
)  # fmt: skip
def test_a_list_is_held(tmp_path: Path, names: dict[str, str], told: str) -> None:
    """A list that lacks a name, or that has one which nothing uses or which the release has no longer, is refused."""
    with pytest.raises(AssertionError) as caught:
        check_private_names(package(tmp_path), names, GIVEN, {"_shells", "_feather", "birds._flight.Wing"})
    assert told in str(caught.value).replace('"', "'")


@pytest.mark.parametrize("name", ["os.path._joinrealpath.way", "vars(os.path)['_joinrealpath'].way"])
def test_an_older_release_may_lack_a_name(tmp_path: Path, name: str) -> None:
    """So may a library that is not installed."""
    major = int(installed_version("numpy").split(".")[0])
    for seen in (f"numpy {major + 1}.0 to {major + 2}.0", "no_such_bird 1.0 to 2.0"):
        check_private_names(package(tmp_path), {name: seen}, GIVEN, {"_shells", "_feather", "birds._flight.Wing"})


def test_private_names_of_the_core() -> None:
    """The core uses few, and only of Python."""
    check_private_names(ROOT / "ddlcore", NAMES, {}, OURS)
