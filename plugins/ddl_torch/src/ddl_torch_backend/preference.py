"""Lets a script that names Gloo, MPI or no backend run on the backend ``ddl`` (the setting ``torch_backend``).

Imported only if the setting asks for it. It imports nothing of ddl.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_REPLACED = ("gloo", "cpu:gloo", "mpi")
# The functions that name a backend, and the place of the argument. Modules that have imported them get the new ones, too.
_FUNCTIONS = (("init_process_group", 0), ("new_group", 2))
_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def prefer(name: str) -> None:
    """Have torch.distributed make groups of the backend ``name`` in the place of Gloo's and MPI's.

    A group with another backend is left alone, and so are its subgroups. With a GPU, so is a group without a backend:
    it would use NCCL for the tensors there.
    """
    import torch.distributed.distributed_c10d as c10d

    for function, place in _FUNCTIONS:
        _replace(function, _preferring(getattr(c10d, function), place, name))
    _replace("monitored_barrier", _monitored_barrier(c10d.monitored_barrier, name))


def _replace(function: str, new: Callable[..., Any]) -> None:
    original = getattr(sys.modules["torch.distributed.distributed_c10d"], function)
    for module in _MODULES:
        if getattr(sys.modules.get(module), function, None) is original:
            setattr(sys.modules[module], function, new)


def _monitored_barrier(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return torch's ``function``, which refuses every backend but Gloo, for groups of the backend ``name``, too."""

    @functools.wraps(function)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        group = dist.group.WORLD if group is None else group
        if group in (None, dist.GroupMember.NON_GROUP_MEMBER) or dist.get_backend(group) != name:
            function(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, (int, float)):  # seconds, as torch's function takes them, too
            timeout = timedelta(seconds=timeout)
        group.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


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
        return name if ours and str(backend).lower() in _REPLACED else backend
    if backend is None:
        return backend if torch.cuda.is_available() else name
    return name if str(backend).lower() in _REPLACED else backend
