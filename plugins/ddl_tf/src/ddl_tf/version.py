"""Checks that a supported version of TensorFlow is installed, before any other module of this package is imported."""

from __future__ import annotations

import importlib.util
from importlib import import_module

OLDEST, NEWEST = (2, 16), (2, 21)
_RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
_INSTALL = "pip install 'tensorflow-cpu>=2.16,<2.22' (or tensorflow, or tensorflow[and-cuda] for GPUs)"


def objection(version: str) -> str:
    """Return why this package does not run with TensorFlow of the given version, or '' if it does."""
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and OLDEST <= tuple(map(int, numbers)) <= NEWEST:
        return ""
    return f"ddl_tf runs with TensorFlow {_RANGE}; version {version} is installed: {_INSTALL}"


def check() -> None:
    """Raise ImportError, with a message of one line, if TensorFlow is missing or its version is not supported."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(f"ddl_tf needs TensorFlow {_RANGE}, and none is installed: {_INSTALL}", name="tensorflow")
    fault = objection(str(import_module("tensorflow").__version__))
    if fault:
        raise ImportError(fault, name="tensorflow")


check()
