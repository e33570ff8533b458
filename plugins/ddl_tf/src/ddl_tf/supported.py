"""Tells whether the installed TensorFlow is one of those that this package runs with. Imports no TensorFlow."""

from __future__ import annotations

from ddlcore.contracts.library import installed_version

OLDEST, NEWEST = (2, 16), (2, 22)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
INSTALL = "pip install 'tensorflow-cpu>=2.16,<2.23' (or tensorflow, or tensorflow[and-cuda] for GPUs)"


def objection(version: str) -> str:
    """Return why this package does not run with TensorFlow of the given version, or '' if it does."""
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and OLDEST <= tuple(map(int, numbers)) <= NEWEST:
        return ""
    return f"ddl_tf runs with TensorFlow {RANGE}; version {version} is installed: {INSTALL}"


def installed_objection() -> str:
    """Return ``objection`` to the TensorFlow that is installed, or '' if its version is not known without an import."""
    version = installed_version("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tf-nightly-cpu")
    return objection(version) if version else ""
