"""Restores the name ``numpy.bool``, which MXNet 1.9.1 needs, in numpy 1.24 to 1.26 when MXNet is imported.

``ddl_mxnet.pth`` makes every interpreter of the environment import this module, so that ``import mxnet`` works even as
the first line of a script. Until MXNet is imported, nothing else happens: numpy is not imported and no file is read.
This module imports only modules that every interpreter has loaded already, which is why its annotations are strings.
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

    Does nothing if numpy has the name already, or is not installed.
    """
    try:
        import numpy as np
    except ImportError:  # MXNet's import will report it
        return
    if "bool" not in vars(np):  # hasattr would cause a warning
        np.bool = bool  # type: ignore[attr-defined]


class _Watch:
    """A finder in front of all other finders of ``sys.meta_path``. It acts only if the imported module is MXNet."""

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
    """Make the module's loader patch numpy before it executes the module.

    A program that only asks whether MXNet is installed gets ``spec`` too, but does not execute the module.
    """
    run = getattr(spec.loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: "ModuleType") -> None:
        mend_numpy()
        run(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]  # this spec's own loader


def watch_for_mxnet() -> None:
    """Install the finder that patches numpy when this interpreter imports MXNet."""
    if "mxnet" not in sys.modules and _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)
