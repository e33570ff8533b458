"""Create the package of a new plugin from the templates in the folder ``templates``."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

KINDS = ("transport", "adapter", "fusion", "tuner", "compressor", "launcher")
SUFFIX = ".tmpl"  # so that no tool reads a template as source code
_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")


def write_package(kind: str, name: str, into: Path) -> Path:
    """Create the package of a new plugin in the folder ``into / ddl-NAME``, and return that folder.

    ``kind`` is one of ``KINDS``, and ``name`` is the plugin's name. Raises ValueError, with a message of one line, if
    the name is not valid or the folder exists.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"'{name}' is no name for a plugin; take small letters, digits and single hyphens, as in my-{kind}"
        )
    folder = into / f"ddl-{name.replace('_', '-')}"
    if folder.exists():
        raise ValueError(f"{folder} exists; choose another name, or another place by --into")
    words = _words(kind, name)
    templates = resources.files("ddl_conform.new") / "templates"
    for part in ("common", kind):
        _copy(templates / part, folder, words)
    return folder


def _words(kind: str, name: str) -> dict[str, str]:
    module = f"ddl_{name.replace('-', '_')}"
    title = "".join(part.title() for part in re.split(r"[-_]", name))
    return {
        "@NAME@": name.replace("_", "-"),
        "@MODULE@": module,
        "@DIST@": module.replace("_", "-"),
        "@CLASS@": title,
        "@KIND@": kind,
    }


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    """Copy a folder of templates to ``target``, and replace the keys of ``words`` by their values.

    The keys are replaced in file names and in the contents of files.
    """
    target.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir(), key=lambda one: one.name):
        place = target / _filled(entry.name, words).removesuffix(SUFFIX)
        if entry.is_dir():
            _copy(entry, place, words)
        else:
            place.write_text(_filled(entry.read_text(encoding="utf-8"), words), encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text
