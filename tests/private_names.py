"""Finds the names of libraries that are not public and that a package of ours uses, and holds a list of them to be true.

A release of a library may drop such a name without notice. So each package has one list of them, in its tests, with the
first and the last release in which the tests have found them. The list must be complete, and a name that the installed
release has no longer is told by a line of its own, and not by whatever fails because of it.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from ddlcore.contracts.library import installed_version, version_numbers

__all__ = ["check_private_names", "private_names"]

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Modules that a library does not document, though no part of their names begins with an underscore.
_UNDOCUMENTED = re.compile(r"(tensorflow\.python|keras\.src|tf_keras\.src)\.[\w.]+")


def private_names(source: Path) -> set[str]:
    """Return the private names in the modules below ``source`` that these modules do not define themselves.

    A name is an identifier, as of an attribute or in a string, or the whole name of what is imported from a private module.
    """
    nodes = _nodes(source)
    return {name for node in nodes for name in _used(node, source.name)} - {
        name for node in nodes for name in _defined(node)
    }


def check_private_names(
    source: Path, names: Mapping[str, str], given: Mapping[str, Any], ours: Set[str] = frozenset()
) -> None:
    """Check the list ``names``: it has each private name that the package ``source`` uses, and the installed releases have it.

    A key is a name such as "torch._C._storage_Use_Count", or an expression with what is in ``given``, such as
    "torch.zeros(1)._version". The value tells the library and the releases in which the name was found first and last, such
    as "torch 2.10 to 2.15". If a later release is installed, the check fails until the list says so. ``ours`` are words in
    the source that look like private names of a library, and are not.
    """
    listed = {name: {name, *(word for node in ast.walk(ast.parse(name)) for word in _used(node, ""))} for name in names}
    missing = {one for one in private_names(source) - ours if not any(_told(one, *item) for item in listed.items())}
    assert not missing, f"not in the list of private names: {sorted(missing)}"
    words = {word for node in _nodes(source) for word in (*_used(node, source.name), *_defined(node))}
    unused = [name for name, item in listed.items() if not any(_told(one, name, item) for one in words)]
    assert not unused, f"in the list of private names, and not used: {unused}"
    newer = {seen for seen in names.values() if _installed(seen.split()[0]) > version_numbers(seen.split()[-1])}
    assert not newer, f"a later release is installed: {sorted(newer)}"
    gone = [f"{name}: found in {seen}" for name, seen in names.items() if not _there(name, given, seen)]
    assert not gone, f"not in the installed release: {gone}"


def _told(one: str, name: str, words: Set[str]) -> bool:
    """Return whether ``name`` of the list, which consists of ``words``, stands for ``one`` in a source."""
    return one in words or name.startswith(f"{one}.")


def _there(name: str, given: Mapping[str, Any], seen: str) -> bool:
    """Return whether the installed release has ``name``. A release older than those it was found in may lack it."""
    library, first, _, _ = seen.split()
    installed = _installed(library)
    if not installed or installed < version_numbers(first):
        return True
    try:
        if re.fullmatch(r"[\w.]+", name):
            pkgutil.resolve_name(name)
        else:
            eval(name, dict(given))
    except (ImportError, AttributeError, KeyError):
        return False
    return True


def _installed(library: str) -> tuple[int, ...]:
    """Return the first two numbers of the installed release, or () if there is none."""
    return sys.version_info[:2] if library == "Python" else version_numbers(installed_version(library))


def _nodes(source: Path) -> list[ast.AST]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py")))
    return [node for tree in trees for node in ast.walk(tree)]


def _used(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the private names that ``node`` itself names, but none that it imports from ``package``."""
    match node:
        case ast.Attribute(attr=name) if _PRIVATE.fullmatch(name):
            yield name
        case ast.Constant(value=str(text)) if _PRIVATE.fullmatch(text) or _UNDOCUMENTED.fullmatch(text):
            yield text
        case ast.ImportFrom(module=str(module), names=aliases, level=0) if module.split(".")[0] != package:
            for name in (f"{module}.{alias.name}" for alias in aliases):
                if _UNDOCUMENTED.fullmatch(name) or any(map(_PRIVATE.fullmatch, name.split("."))):
                    yield name


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield what ``node`` defines: a function, a class, an attribute or a variable that is set, or attributes of ``self``."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            yield name
