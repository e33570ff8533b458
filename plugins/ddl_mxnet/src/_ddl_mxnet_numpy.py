"""Gives numpy 1.24 to 1.26 the name ``numpy.bool`` back when MXNet is imported: MXNet 1.9.1 asks for it.

``ddl_mxnet.pth`` has every interpreter of the environment import this, so that ``import mxnet`` works as a
script's first line too. Nothing else happens before that line: no import of numpy, no look at the disk. Hence this
imports nothing that an interpreter has not loaded anyway, which is why its annotations are strings.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["mend_numpy", "watch_for_mxnet"]


def mend_numpy() -> None:
    """Sets ``numpy.bool`` to Python's own, as it was until numpy 1.23; no effect where numpy has one, or is missing."""
    try:
        import numpy as np
    except ImportError:  # MXNet will say so
        return
    if "bool" not in vars(np):  # not hasattr, which would warn
        np.bool = bool  # type: ignore[attr-defined]


class _Watch:
    """Stands in front of the finders of modules, and has a word only where the module is MXNet."""

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
    """numpy is mended when the module is run, not when somebody only asks whether it is there."""
    run = getattr(spec.loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: "ModuleType") -> None:
        mend_numpy()
        run(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]  # this spec's own loader


def watch_for_mxnet() -> None:
    """Has numpy mended when MXNet is imported in this interpreter, once it is."""
    if "mxnet" not in sys.modules and _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)
