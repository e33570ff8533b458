"""Find a module, and import it without importing its package, because the package may import a whole framework."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_CALLERS = ("finding.py", "loader.py", "registry.py")
# The files whose frames are between a call of the registry and a plugin's own code in a traceback.
_OWN = frozenset({importlib.__file__, *(__file__.replace("finding.py", name) for name in _CALLERS)})


def find(name: str) -> ModuleSpec | None:
    """Return the spec of module ``name`` without importing the module or its packages.

    Return None if there is no such module. importlib.util.find_spec, in contrast, imports the packages in a dotted
    name.
    """
    at, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(at)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            if spec.origin is None:  # a namespace package: it has no code to run, and computes its own path
                importlib.import_module(at)
            at = f"{at}.{part}"
            spec = PathFinder.find_spec(at, spec.submodule_search_locations)
    except (ImportError, ValueError):  # a parent is not a package, or a loaded module has no spec
        return None
    return spec


def run_alone(name: str) -> ModuleType:
    """Import and return module ``name`` without importing its parent packages.

    In this way a plugin can be listed without running the ``__init__`` of its package, which may import a framework.
    The module itself may still import its parent packages. Raises ModuleNotFoundError if there is no such module, and
    any exception that the module raises during the import.
    """
    if name in sys.modules or "." not in name:
        return importlib.import_module(name)
    spec = find(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def raised_at(error: BaseException) -> str:
    """Return one line of text about ``error``, which the code of a plugin has raised.

    The text contains the plugin's file and line number, if they are known.
    """
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if isinstance(error, SyntaxError):  # its message has the file and the line, and no frame of that file exists
        return said
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename not in _OWN
    ]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said
