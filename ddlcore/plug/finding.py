"""Where a module lies, and running it alone: its package, whose import may cost a framework's, is left alone."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["find", "run_alone"]


def find(name: str) -> ModuleSpec | None:
    """The spec of module ``name``, or None where there is none. Nothing is imported.

    importlib.util.find_spec would import the parents of a dotted name.
    """
    at, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(at)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            if spec.origin is None:  # a package without a file: it has no code to run, and finds its parts by itself
                importlib.import_module(at)
            at = f"{at}.{part}"
            spec = PathFinder.find_spec(at, spec.submodule_search_locations)
    except (ImportError, ValueError):  # a parent that is no package, or a loaded module without a spec
        return None
    return spec


def run_alone(name: str) -> ModuleType:
    """Module ``name``, imported without its parents unless it asks for them.

    So listing a plugin does not run its package's ``__init__``, which may import a framework and is free to.
    Raises ModuleNotFoundError where there is no such module, else what the module raises.
    """
    if name in sys.modules or "." not in name:
        return importlib.import_module(name)
    spec = find(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for one, look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
