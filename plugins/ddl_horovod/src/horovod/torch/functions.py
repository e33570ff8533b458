"""Objects, parameters and the state of optimizers, sent to all ranks."""

from __future__ import annotations

from ddl_horovod.process_sets import ProcessSet
from ddl_torch import (
    allgather,
    allgather_object,
    broadcast_,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

from ddlcore.api import (
    global_process_set,
    rank,
    size,
    synchronize,
)

__all__ = [
    "ProcessSet",
    "allgather",
    "allgather_object",
    "broadcast_",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "global_process_set",
    "rank",
    "size",
    "synchronize",
]
