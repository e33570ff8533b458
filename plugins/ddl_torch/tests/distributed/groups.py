"""Worlds of threads, each rank with a process group whose methods a test calls directly.

torch keeps the groups of ``torch.distributed`` once for each process, so they cannot be used here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ddl_torch.distributed.group import DdlProcessGroup

from ddlcore import api
from ddlcore.testing import run_world

__all__ = ["OP", "options", "run"]

OP = dist.ReduceOp


def run(
    size: int, play: Callable[[DdlProcessGroup, int], Any], timeout_s: float = 60.0, backend: str = "threads"
) -> list[Any]:
    """Call ``play(group, rank)`` on every rank of a world of threads. Return the results by rank."""
    store = dist.HashStore()

    def begin(rank: int, job: api.Job) -> Any:
        ranks = range(size)
        group = DdlProcessGroup(store, rank, ranks, api.global_process_set, timedelta(seconds=timeout_s), False, store)
        return play(group, rank)

    return run_world(size, begin, backend=backend)


def options(kind: str = "Allreduce", **values: Any) -> Any:
    """Return the options that torch gives to a collective, for a call that waits unless ``values`` say otherwise."""
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(made, name, value)
    return made
