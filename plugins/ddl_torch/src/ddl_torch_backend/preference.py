"""Lets a script that names Gloo, or no backend, run on the backend ``ddl`` (the setting ``torch_backend``).

Imported only if the setting asks for it. It imports nothing of ddl.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_GLOO = ("gloo", "cpu:gloo")
# The functions that name a backend, and the place of the argument. Modules that have imported them get the new ones, too.
_FUNCTIONS = (("init_process_group", 0), ("new_group", 2))
_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def prefer(name: str) -> None:
    """Have torch.distributed make groups of the backend ``name`` in the place of Gloo's.

    A group with another backend is left alone, and so are its subgroups. With a GPU, so is a group without a backend:
    it would use NCCL for the tensors there.
    """
    import torch.distributed.distributed_c10d as c10d

    for function, place in _FUNCTIONS:
        original = getattr(c10d, function)
        preferring = _preferring(original, place, name)
        for module in _MODULES:
            if getattr(sys.modules.get(module), function, None) is original:
                setattr(sys.modules[module], function, preferring)


def _preferring(function: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def preferring(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], _chosen(args[place], name), *args[place + 1 :])
        else:
            kwargs["backend"] = _chosen(kwargs.get("backend"), name)
        return function(*args, **kwargs)

    return preferring


def _chosen(backend: Any, name: str) -> Any:
    """Return the backend that is used if the script asks for ``backend``."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # a further group
        ours = dist.get_backend() == name
        return name if ours and str(backend).lower() in _GLOO else backend
    if backend is None:
        return backend if torch.cuda.is_available() else name
    return name if str(backend).lower() in _GLOO else backend
