"""Find a module and run it alone: without importing its package, which could import a whole framework."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_CALLERS = ("finding.py", "loader.py", "registry.py")
# What lies between a call of the registry and a plugin's own code.
_OWN = frozenset({importlib.__file__, *(__file__.replace("finding.py", name) for name in _CALLERS)})


def find(name: str) -> ModuleSpec | None:
    """Return the spec of module ``name`` without importing the module; None if there is no such module.

    importlib.util.find_spec would import the parents of a dotted name.
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
    except (ImportError, ValueError):  # a parent that is no package, or a loaded module that has no spec
        return None
    return spec


def run_alone(name: str) -> ModuleType:
    """Import module ``name`` without importing its parents, unless the module imports them itself.

    So a plugin can be listed without running the ``__init__`` of its package, which may import a framework. Raises
    ModuleNotFoundError if there is no such module, otherwise what the module raises.
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
    """Return an error that came up in a plugin in one line, with the plugin's file and line where that is known."""
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if isinstance(error, SyntaxError):  # says the file and the line itself, and no frame of that file exists
        return said
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename not in _OWN
    ]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said
