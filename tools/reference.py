"""Writes docs/reference.md: the contracts for plugins, from their docstrings and signatures.

python tools/reference.py [FILE]
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order in which the author of a plugin needs them.
MODULES = (
    "ddlcore.hooks",
    "ddlcore.contracts.transport",
    "ddlcore.contracts.memory",
    "ddlcore.contracts.adapter",
    "ddlcore.contracts.framework",
    "ddlcore.contracts.compressor",
    "ddlcore.contracts.fusion",
    "ddlcore.contracts.tuner",
    "ddlcore.contracts.launcher",
    "ddlcore.contracts.cluster",
    "ddlcore.contracts.device",
    "ddlcore.contracts.kernels",
    "ddlcore.contracts.machine_code.code",
    "ddlcore.contracts.machine_code.loading",
    "ddlcore.contracts.machine_code.cpu",
    "ddlcore.contracts.machine_code.intrinsics",
    "ddl_doctor.contracts.check",
    "ddl_doctor.contracts.known_bad",
    "ddl_doctor.contracts.bench",
    "ddlcore.contracts.communicators",
    "ddlcore.contracts.discovery",
    "ddlcore.contracts.store",
    "ddlcore.contracts.solo",
    "ddlcore.threads",
    "ddlcore.types",
    "ddlcore.errors",
    "ddl_conform.transports",
    "ddl_conform.transport_base",
    "ddl_conform.processes",
    "ddl_conform.composed",
    "ddl_conform.adapters",
    "ddl_conform.adapter_base",
    "ddl_conform.compressors",
    "ddl_conform.fusion",
    "ddl_conform.tuners",
    "ddl_conform.launchers",
    "ddl_conform.process_groups",
    "ddl_conform.devices",
    "ddl_conform.world",
)
INTERNAL = {"DTYPES", "OPS", "RankProcesses", "only_where"}  # names that only the conformance kit uses
HELPERS = "# --- used by the standard tests"  # in a suite: authors of plugins write or set only what is above this line
# Methods of a suite that pytest calls.
CALLED_BY_PYTEST = re.compile(r"test_|(setup|teardown)_(class|method)$")
HEAD = """# Reference of the contracts

This page describes every class and function that a plugin implements or uses. `python tools/reference.py` writes it from
the docstrings. [Writing a plugin](plugins.md) explains where to begin. At the end are the suites of the
conformance kit (ddl-conform), without their tests: import them from `ddlcore.testing`. What stands under
`ddl_doctor.contracts` is imported from `ddlcore.contracts`, with ddl-doctor installed.
"""

__all__ = ["main", "reference", "source_of"]


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in MODULES:
        source = source_of(name).read_text(encoding="utf-8")
        module = ast.parse(source)
        parts.append(f"## `{name}`\n\n{ast.get_docstring(module) or ''}\n")
        public = _exports(module) - INTERNAL
        comments = _comments(source)
        parts.extend(_fields(module.body, comments, public, "Constants:\n\n"))
        for item in module.body:
            if isinstance(item, ast.ClassDef) and item.name in public:
                parts.extend(_class(item, comments))
            elif isinstance(item, ast.FunctionDef) and item.name in public:
                parts.append(f"### `{_signature(item)}`\n\n{ast.get_docstring(item) or ''}\n")
    return "\n".join(parts).replace("``", "`").rstrip() + "\n"


def source_of(module: str) -> Path:
    """Return the file of ``module``, which is one of ``MODULES``."""
    package, *parts = module.split(".")
    folder = ROOT if package == "ddlcore" else ROOT / "plugins" / package / "src"
    return (folder / package / Path(*parts)).with_suffix(".py")


def _exports(module: ast.Module) -> set[str]:
    for item in module.body:
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in item.targets):
            return set(ast.literal_eval(item.value))
    return set()


def _class(item: ast.ClassDef, comments: Mapping[int, str]) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in item.bases)
    said = re.sub(r"^(>>>|\.\.\.)", r"    \1", ast.get_docstring(item) or "", flags=re.MULTILINE)
    yield f"### class `{item.name}{f'({bases})' if bases else ''}`\n\n{said}\n"
    end = item.end_lineno or item.lineno
    end = next((line for line, text in comments.items() if item.lineno < line < end and text == HELPERS), end)
    yield from _fields(item.body, comments)
    for method in item.body:
        if not isinstance(method, ast.FunctionDef) or method.lineno > end or CALLED_BY_PYTEST.match(method.name):
            continue
        if not method.name.startswith("_") or method.name == "__init__":
            said = (ast.get_docstring(method) or "").replace("\n\n", "\n")
            text = [f"- `{_signature(method)}`{_kind(method)}", *(f"  {line}".rstrip() for line in said.splitlines())]
            yield "\n".join(text) + "\n"


def _fields(
    body: list[ast.stmt], comments: Mapping[int, str], public: set[str] | None = None, head: str = ""
) -> Iterator[str]:
    """Yield the list of the assignments in ``body``, such as the fields of a class, after ``head``; nothing if none.

    ``public`` contains the names to list. None means all names that do not begin with an underscore.
    """
    fields = []
    for item in body:
        if isinstance(item, ast.AnnAssign):
            target: ast.expr = item.target
        elif isinstance(item, ast.Assign):
            target = item.targets[0]
        else:
            continue
        name = ast.unparse(target)
        if name in public if public is not None else not name.startswith("_"):
            fields.append(_field(item, name, comments))
    if fields:
        yield head + "\n".join(fields) + "\n"


def _field(item: ast.AnnAssign | ast.Assign, name: str, comments: Mapping[int, str]) -> str:
    """Return an assignment with the comments on its lines. A value that mentions a private name is shown as …"""
    lines = range(item.lineno, (item.end_lineno or item.lineno) + 1)
    said = " ".join(comments[line].removeprefix("#").strip() for line in lines if line in comments)
    kind = f": {ast.unparse(item.annotation)}" if isinstance(item, ast.AnnAssign) else ""
    value = ast.unparse(item.value) if item.value is not None else ""
    if value:
        value = " = …" if re.search(r"\b_[A-Za-z]", value) else f" = {value}"
    return f"- `{name}{kind}{value}`{f': {said}' if said else ''}"


def _comments(source: str) -> dict[int, str]:
    """Return the comments of a module by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


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
