"""Imports MXNet. If MXNet cannot be imported, the error says in one line which command to run."""

from __future__ import annotations

import importlib
import importlib.util

from _ddl_mxnet_numpy import mend_numpy

OLDEST, NEWEST = (1, 9, 1), (2,)
WANTED = 'pip install "mxnet>=1.9.1,<2" "numpy>=1.26,<2"'


def objection() -> str:
    """Return why the installed MXNet and numpy cannot be used. The result is "" if they can be, or if nothing is known.

    This function imports neither of them, but it does import ddlcore. The rest of this module works without ddlcore.
    """
    from ddlcore.contracts.library import installed_version

    return _objection(installed_version("mxnet"), installed_version("numpy"))


def _objection(mxnet: str, numpy: str) -> str:
    """Return why these versions cannot be used, or "". A version that is not known is given as ""."""
    if numpy and _numbers(numpy) >= (2,):
        return f'MXNet does not work with numpy 2, and numpy {numpy} is installed; run: pip install "numpy>=1.26,<2"'
    if mxnet and not OLDEST <= _numbers(mxnet) < NEWEST:
        return f"ddl_mxnet is for MXNet 1.9.1, and {mxnet} is installed; run: {WANTED}"
    return ""


def require_mxnet() -> None:
    """Import MXNet. Raises ImportError if MXNet or a compatible numpy is missing; the message names the command to run.

    Before the import, ``mend_numpy`` restores a name in numpy that MXNet needs.
    """
    _refuse(_objection("", importlib.import_module("numpy").__version__))
    if importlib.util.find_spec("mxnet") is None:
        raise ImportError(f"ddl_mxnet needs MXNet, which is not installed; run: {WANTED}")
    mend_numpy()
    try:
        found = importlib.import_module("mxnet").__version__
    except OSError as error:  # MXNet's shared library, or a library that it needs, cannot be loaded
        raise ImportError(
            f"MXNet's library cannot be loaded: {error}; on Debian run: apt-get install libgomp1 libquadmath0"
        ) from error
    _refuse(_objection(found, ""))


def _refuse(fault: str) -> None:
    if fault:
        raise ImportError(fault)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version as a tuple: ``1.9.1.post0`` gives (1, 9, 1)."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
