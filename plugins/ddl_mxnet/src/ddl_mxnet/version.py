"""Imports MXNet. If MXNet cannot be imported, the error says in one line which command to run."""

from __future__ import annotations

import importlib
import importlib.util

from _ddl_mxnet_numpy import mend_numpy

OLDEST, NEWEST = (1, 9, 1), (2,)
WANTED = 'pip install "mxnet>=1.9.1,<2" "numpy>=1.26,<2"'


def require_mxnet() -> None:
    """Import MXNet. Raises ImportError if MXNet or a compatible numpy is missing; the message names the command to run.

    Before the import, ``mend_numpy`` restores a name in numpy that MXNet needs.
    """
    numpy = importlib.import_module("numpy").__version__
    if _numbers(numpy) >= (2,):
        raise ImportError(
            f'MXNet does not work with numpy 2, and numpy {numpy} is installed; run: pip install "numpy>=1.26,<2"'
        )
    if importlib.util.find_spec("mxnet") is None:
        raise ImportError(f"ddl_mxnet needs MXNet, which is not installed; run: {WANTED}")
    mend_numpy()
    try:
        found = importlib.import_module("mxnet").__version__
    except OSError as error:  # MXNet's shared library, or a library that it needs, cannot be loaded
        raise ImportError(
            f"MXNet's library cannot be loaded: {error}; on Debian run: apt-get install libgomp1 libquadmath0"
        ) from error
    if not OLDEST <= _numbers(found) < NEWEST:
        raise ImportError(f"ddl_mxnet is for MXNet 1.9.1, and {found} is installed; run: {WANTED}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version as a tuple: ``1.9.1.post0`` gives (1, 9, 1)."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
