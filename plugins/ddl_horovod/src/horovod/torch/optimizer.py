"""The optimizer that steps on reduced gradients."""

from __future__ import annotations

from ddl_torch import (
    Compression,
    DistributedOptimizer,
    allreduce_async_,
    broadcast_object,
    grouped_allreduce_async_,
    rocm_built,
    sparse_allreduce_async,
)

from ddlcore.api import (
    ProcessSet,
    global_process_set,
    size,
    synchronize,
)
from ddlcore.types import (
    Adasum,
    Average,
    Sum,
)
from horovod.common.util import (
    split_list,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "allreduce_async_",
    "broadcast_object",
    "global_process_set",
    "grouped_allreduce_async_",
    "rocm_built",
    "size",
    "sparse_allreduce_async",
    "split_list",
    "synchronize",
]
