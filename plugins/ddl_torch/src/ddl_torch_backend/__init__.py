"""Tells torch.distributed of the backend ``ddl``. torch calls ``register`` at the end of every ``import torch``.

So this module imports nothing else of ddl, and never raises an exception: that would break ``import torch`` in every
program of the environment. The backend itself is imported when a program asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["register"]

NAME = "ddl"
PREFERRED = "DDL_TORCH_BACKEND"


def register() -> None:
    """Make ``torch.distributed.init_process_group("ddl")`` possible, if this torch has torch.distributed."""
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            _prefer(os.environ)
    except Exception:
        return  # another version of torch: ``init_process_group("ddl")`` then says that it knows no such backend


def _prefer(environ: Mapping[str, str]) -> None:
    if environ.get(PREFERRED) == NAME:
        from ddl_torch_backend.preference import prefer

        prefer(NAME)


def _create(options: Any, backend_options: Any = None) -> Any:
    from ddl_torch.distributed.creating import create

    return create(options, backend_options)
