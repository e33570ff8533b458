"""Print the public surface of a Horovod release, by module: names, signatures and defaults, without importing Horovod.

Usage: python tools/horovod_surface.py FOLDER > plugins/ddl_horovod/tests/surface.json

FOLDER is the unpacked source distribution or a checkout, which contains the folder ``horovod``. The result holds facts
only. A test of ddl-horovod compares the packages that ddl-horovod contains with it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "horovod",
    "horovod.common",
    "horovod.common.basics",
    "horovod.common.elastic",
    "horovod.common.exceptions",
    "horovod.common.process_sets",
    "horovod.common.util",
    "horovod.data",
    "horovod.data.data_loader_base",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
    "horovod.mxnet",
    "horovod.mxnet.compression",
    "horovod.mxnet.functions",
    "horovod.mxnet.mpi_ops",
    "horovod.runner",
    "horovod.tensorflow",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.data",
    "horovod.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util",
    "horovod.torch",
    "horovod.torch.compression",
    "horovod.torch.elastic",
    "horovod.torch.elastic.sampler",
    "horovod.torch.elastic.state",
    "horovod.torch.functions",
    "horovod.torch.mpi_ops",
    "horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm",
)
Found = dict[str, object]  # name -> signature, "value", or the methods of a class by name


def main(folder: str) -> None:
    """Print the surface of the release in ``folder`` as JSON."""
    sources = Sources(Path(folder))
    print(json.dumps({name: sources.surface(name) for name in MODULES}, indent=1, sort_keys=True))


class Sources:
    """The modules of a release, as syntax trees. ``root`` is the folder that contains the package ``horovod``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._defined: dict[str, dict[str, ast.AST | tuple[str, str]]] = {}

    def surface(self, module: str) -> Found:
        """Return the public names of ``module`` that belong to Horovod, each with its signature."""
        found: Found = {}
        for name in self._names(module):
            if not name.startswith("_"):
                described = self._described(module, name)
                if described is not None:
                    found[name] = described
        return found

    def _described(self, module: str, name: str) -> object | None:
        """Return the signature of what ``name`` means in ``module``, or None if it is from another library."""
        at = self._names(module).get(name)
        if isinstance(at, tuple):
            origin, original = at
            if not origin.startswith("horovod"):
                return None
            if not original or self._path(f"{origin}.{original}"):
                return "module"
            return self._described(origin, original) if self._path(origin) else "value"
        if isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _signature(at, bound=False)
        if isinstance(at, ast.ClassDef):
            return {
                one.name: _signature(one, bound=True) if not _is_property(one) else "property"
                for one in at.body
                if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or not one.name.startswith("_"))
            }
        return "value" if at is not None else None

    def _names(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        if module not in self._defined:
            path = self._path(module)
            assert path, module
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            self._defined[module] = dict(_bindings(ast.parse(path.read_text("utf-8")).body, package))
        return self._defined[module]

    def _path(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)


def _bindings(body: list[ast.stmt], package: str) -> Iterator[tuple[str, ast.AST | tuple[str, str]]]:
    """Yield each name that ``body`` binds, and its definition or, for an import, the module and the name there."""
    for one in body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield one.name, one
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        yield each.id, one
        elif isinstance(one, ast.Import):
            for alias in one.names:
                yield alias.asname or alias.name.partition(".")[0], (alias.name, "")
        elif isinstance(one, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - one.level + 1] if one.level else []
            origin = ".".join([*above, *([one.module] if one.module else [])])
            for alias in one.names:
                yield alias.asname or alias.name, (origin, alias.name)
        elif isinstance(one, (ast.If, ast.Try, ast.With)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(one, part, []):
                    yield from _bindings(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], package)


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> list[str]:
    """Return the parameters, each as "NAME" or "NAME=DEFAULT". If ``bound``, leave out the first one, such as self."""
    given = function.args
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    words = [_word(one.arg, default) for one, default in zip(positional, defaults, strict=True)]
    words = words[1:] if bound and not static else words
    if given.vararg:
        words.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        words.append("*")
    words += [_word(one.arg, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*words, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]


def _word(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).split(".")[-1] in ("property", "setter") for one in function.decorator_list)


if __name__ == "__main__":
    main(sys.argv[1])
