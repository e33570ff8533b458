"""Take names of the plugin contract from a package that is installed separately."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ddlcore.text.installing import pip_install

__all__ = ["taken_from"]


def taken_from(module: str, name: str, wanted: str) -> Any:
    """Return ``name`` of ``module``, for the module ``wanted`` of ddlcore that forwards to it.

    Raises ModuleNotFoundError, with the command that installs the package, if the package is not installed, and
    AttributeError if it has no such name, or if the name is one by which Python asks any module.
    """
    if name.startswith("__") and name != "__all__":  # Python and its tools ask every module for such names
        raise AttributeError(f"module {wanted!r} has no attribute {name!r}")
    package = module.partition(".")[0]
    if find_spec(package) is None:
        text = f"{wanted} is in a package of its own; {pip_install(package.replace('_', '-'))}"
        raise ModuleNotFoundError(text, name=package)
    return getattr(import_module(module), name)
