"""Checks that a supported version of TensorFlow is installed, before any other module of this package is imported."""

from __future__ import annotations

import importlib.util
from importlib import import_module

from ddl_tf.supported import INSTALL, RANGE, objection


def check() -> None:
    """Raise ImportError, with a message of one line, if TensorFlow is missing or its version is not supported."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(f"ddl_tf needs TensorFlow {RANGE}, and none is installed: {INSTALL}", name="tensorflow")
    fault = objection(str(import_module("tensorflow").__version__))
    if fault:
        raise ImportError(fault, name="tensorflow")


check()
