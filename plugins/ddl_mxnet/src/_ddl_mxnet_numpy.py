"""Restores the name ``numpy.bool`` when MXNet is imported. MXNet 1.9.1 needs this name, and numpy 1.24 to 1.26 lack it.

``ddl_mxnet.pth`` makes every interpreter of the environment import this module at its start. So ``import mxnet`` works
even as the first line of a script. Until MXNet is imported, this module imports nothing and reads no file, so that
other programs do not start more slowly. For the same reason, the annotations in this module are strings.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["mend_numpy", "watch_for_mxnet"]


def mend_numpy() -> None:
    """Set ``numpy.bool`` to Python's ``bool``, as it was until numpy 1.23.

    Does nothing if numpy already has the name ``bool``, or if numpy is not installed.
    """
    try:
        import numpy as np
    except ImportError:  # MXNet's import will report it
        return
    if "bool" not in vars(np):  # hasattr would cause a warning
        np.bool = bool  # type: ignore[attr-defined]


class _Watch:
    """An import finder, the first one in ``sys.meta_path``, which does nothing unless MXNet is imported."""

    @classmethod
    def find_spec(cls, name: str, path: "Any" = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
        if name != "mxnet":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not cls else None
            if spec is not None:
                _mend_before(spec)
                return spec
        return None


def _mend_before(spec: "ModuleSpec") -> None:
    """Change the loader of ``spec``, the import spec of MXNet: it calls ``mend_numpy`` before it executes the module.

    So numpy is not changed if a program only looks for MXNet and does not import it.
    """
    run = getattr(spec.loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: "ModuleType") -> None:
        mend_numpy()
        run(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]  # this spec's own loader


def watch_for_mxnet() -> None:
    """Install the import finder that calls ``mend_numpy`` when this interpreter imports MXNet."""
    if "mxnet" not in sys.modules and _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)
