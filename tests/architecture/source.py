"""The tree's source files, parsed, for tests that hold them to the architecture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ddlcore.config.file import read_toml

__all__ = ["ROOT", "Source", "allowed", "core", "every", "plugins", "tools"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One file of Python; ``module`` is the name under which it is imported."""

    path: Path
    module: str

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    def forget(self) -> None:
        """Frees what was read and parsed; it is there again when it is asked for."""
        for name in ("text", "tree", "nodes"):
            vars(self).pop(name, None)

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, absolute dotted name) of everything imported, wherever in the file; of ``from a import b``: a.b."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"


@cache  # so that each file is read and parsed once, however many tests look at it
def _below(folder: Path, package: str) -> tuple[Source, ...]:
    sources = []
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        sources.append(Source(path, ".".join(part for part in parts if part != "__init__")))
    return tuple(sources)


def core() -> list[Source]:
    """Every file of ddlcore."""
    return list(_below(ROOT / "ddlcore", "ddlcore"))


def plugins() -> dict[str, list[Source]]:
    """Every file of each plugin that uses the public part of ddlcore only, by the name of its module."""
    return {name: sources for name, sources in _packages().items() if name not in tools()}


def tools() -> dict[str, list[Source]]:
    """Every file of each tool package, by the name of its module: it asks for the ddlcore of its own version."""
    pinned = {
        path.parent.name
        for path in (ROOT / "plugins").glob("*/pyproject.toml")
        if any(one.startswith("ddlcore==") for one in _project(path.parent.name)["dependencies"])
    }
    return {name: sources for name, sources in _packages().items() if _home(sources) in pinned}


def allowed(package: str) -> set[str]:
    """The packages that ``package`` may import beside ddlcore: those of its distribution, and of those it offers to bring.

    A distribution offers to bring another one by an optional dependency, or by one on the exact version. Another
    dependency is only for the user, who is to have both.
    """
    packages = _packages()
    home = _home(packages[package])
    brought = {
        re.split(r"[^\w-]", one)[0].replace("-", "_")
        for asked in (_exact(home), *_project(home).get("optional-dependencies", {}).values())
        for one in asked
    }
    return {name for name, sources in packages.items() if _home(sources) in {home, *brought}}


def _exact(home: str) -> list[str]:
    return [one for one in _project(home)["dependencies"] if "==" in one]


def _home(sources: Sequence[Source]) -> str:
    """The folder in plugins/ of the distribution that ``sources`` belong to. A distribution may have two packages."""
    return sources[0].path.relative_to(ROOT).parts[1]


@cache
def _project(home: str) -> dict[str, Any]:
    return read_toml(ROOT / "plugins" / home / "pyproject.toml")["project"]  # type: ignore[return-value]


def _packages() -> dict[str, list[Source]]:
    found = (ROOT / "plugins").glob("*/src/*")
    folders = sorted(path for path in found if path.is_dir() and path.suffix == "" and path.name != "__pycache__")
    return {folder.name: list(_below(folder, folder.name)) for folder in folders}


def every() -> list[Source]:
    """The core, all tool packages and all plugins."""
    return core() + [source for sources in _packages().values() for source in sources]
