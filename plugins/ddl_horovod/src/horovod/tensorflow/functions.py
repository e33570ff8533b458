"""Objects and variables, sent to all ranks."""

from __future__ import annotations

from ddl_horovod.process_sets import ProcessSet
from ddl_tf import (
    allgather,
    allgather_object,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

from ddlcore.api import (
    global_process_set,
    rank,
    size,
)

__all__ = [
    "ProcessSet",
    "allgather",
    "allgather_object",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "global_process_set",
    "rank",
    "size",
]
