"""The optimizer that steps on reduced gradients."""

from __future__ import annotations

import ddl_torch
from ddl_horovod.choosing import with_adasum
from ddl_horovod.process_sets import ProcessSet
from ddl_horovod.torch_adasum import optimizer_of
from ddl_torch import (
    Compression,
    broadcast_object,
    rocm_built,
    sparse_allreduce_async,
)

from ddlcore.api import (
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
from horovod.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_

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

DistributedOptimizer = with_adasum(ddl_torch.DistributedOptimizer, optimizer_of)
