"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from ddl_torch import (
    SyncBatchNorm,
    allgather_async,
)

from ddlcore.api import (
    size,
    synchronize,
)
from ddlcore.types import (
    Sum,
)
from horovod.torch.mpi_ops import allreduce_async

__all__ = [
    "Sum",
    "SyncBatchNorm",
    "allgather_async",
    "allreduce_async",
    "size",
    "synchronize",
]
