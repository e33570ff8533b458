"""Writes docs/reference.md: the contracts for plugins, from their docstrings and signatures.

python tools/reference.py [FILE]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order in which the author of a plugin needs them.
MODULES = (
    "hooks",
    "contracts/transport",
    "contracts/memory",
    "contracts/adapter",
    "contracts/framework",
    "contracts/compressor",
    "contracts/fusion",
    "contracts/tuner",
    "contracts/launcher",
    "contracts/cluster",
    "contracts/device",
    "contracts/kernels",
    "contracts/check",
    "contracts/known_bad",
    "contracts/bench",
    "contracts/communicators",
    "contracts/discovery",
    "contracts/store",
    "types",
    "errors",
)
HEAD = """# Reference of the contracts

This page describes every class and function that a plugin implements or uses. `python tools/reference.py` writes it from
the docstrings. [Writing a plugin](plugins.md) explains where to begin.
"""

__all__ = ["main", "reference"]


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in MODULES:
        source = (ROOT / "ddlcore" / f"{name}.py").read_text(encoding="utf-8")
        module = ast.parse(source)
        parts.append(f"## `ddlcore.{name.replace('/', '.')}`\n\n{ast.get_docstring(module) or ''}\n")
        public = _exports(module)
        for item in module.body:
            if isinstance(item, ast.ClassDef) and item.name in public:
                parts.extend(_class(item, source.splitlines()))
            elif isinstance(item, ast.FunctionDef) and item.name in public:
                parts.append(f"### `{_signature(item)}`\n\n{ast.get_docstring(item) or ''}\n")
    return "\n".join(parts).replace("``", "`").rstrip() + "\n"


def _exports(module: ast.Module) -> set[str]:
    for item in module.body:
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in item.targets):
            return set(ast.literal_eval(item.value))
    return set()


def _class(item: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in item.bases)
    yield f"### class `{item.name}{f'({bases})' if bases else ''}`\n\n{ast.get_docstring(item) or ''}\n"
    fields = [_field(one, lines) for one in item.body if isinstance(one, ast.AnnAssign)]
    if fields:
        yield "\n".join(fields) + "\n"
    for method in item.body:
        if isinstance(method, ast.FunctionDef) and (not method.name.startswith("_") or method.name == "__init__"):
            said = (ast.get_docstring(method) or "").replace("\n\n", "\n")
            text = [f"- `{_signature(method)}`{_kind(method)}", *(f"  {line}".rstrip() for line in said.splitlines())]
            yield "\n".join(text) + "\n"


def _field(item: ast.AnnAssign, lines: list[str]) -> str:
    """Return a field with its trailing comment."""
    behind = lines[(item.end_lineno or item.lineno) - 1].encode()[item.end_col_offset or 0 :].decode().strip()
    said = f": {behind.removeprefix('#').strip()}" if behind.startswith("#") else ""
    value = f" = {ast.unparse(item.value)}" if item.value is not None else ""
    return f"- `{ast.unparse(item.target)}: {ast.unparse(item.annotation)}{value}`{said}"


def _signature(item: ast.FunctionDef) -> str:
    given = ast.unparse(item.args)
    given = given.removeprefix("self, ").removeprefix("self").removeprefix("cls, ").removeprefix("cls")
    result = f" → {ast.unparse(item.returns)}" if item.returns is not None else ""
    return f"{item.name}({given}){result}"


def _kind(item: ast.FunctionDef) -> str:
    names = {ast.unparse(decorator) for decorator in item.decorator_list}
    kinds = {"abstractmethod": "to be written", "property": "property", "classmethod": "class method"}
    said = [word for name, word in kinds.items() if name in names]
    return f" ({', '.join(said)})" if said else ""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs/reference.md")
    file: Path = parser.parse_args().file
    file.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
