"""Objects, sent to all ranks."""

from __future__ import annotations

from ddl_mxnet import (
    allgather,
    allgather_object,
    broadcast_,
    broadcast_object,
)

from ddlcore.api import (
    rank,
    size,
)

__all__ = [
    "allgather",
    "allgather_object",
    "broadcast_",
    "broadcast_object",
    "rank",
    "size",
]
