"""The collectives for PyTorch's tensors, and the world that they run in."""

from __future__ import annotations

import ddl_torch
from ddl_horovod.beginning import (
    init,
)
from ddl_horovod.choosing import with_adasum
from ddl_horovod.process_sets import ProcessSet, add_process_set
from ddl_horovod.timelines import (
    start_timeline,
    stop_timeline,
)
from ddl_horovod.torch_adasum import verb
from ddl_torch import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    reducescatter,
    reducescatter_async,
    rocm_built,
    sparse_allreduce_async,
)

from ddlcore.api import (
    barrier,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    remove_process_set,
    shutdown,
    size,
    synchronize,
)
from ddlcore.types import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import (
    HorovodInternalError,
)
from horovod.common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from horovod.torch.compression import (
    Compression,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "check_installed_version",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_average_backwards_compatibility_fun",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

allreduce = with_adasum(ddl_torch.allreduce, verb(single=True, in_place=False, waits=True))
allreduce_ = with_adasum(ddl_torch.allreduce_, verb(single=True, in_place=True, waits=True))
allreduce_async = with_adasum(ddl_torch.allreduce_async, verb(single=True, in_place=False, waits=False))
allreduce_async_ = with_adasum(ddl_torch.allreduce_async_, verb(single=True, in_place=True, waits=False))
grouped_allreduce = with_adasum(ddl_torch.grouped_allreduce, verb(single=False, in_place=False, waits=True))
grouped_allreduce_ = with_adasum(ddl_torch.grouped_allreduce_, verb(single=False, in_place=True, waits=True))
grouped_allreduce_async = with_adasum(
    ddl_torch.grouped_allreduce_async, verb(single=False, in_place=False, waits=False)
)
grouped_allreduce_async_ = with_adasum(
    ddl_torch.grouped_allreduce_async_, verb(single=False, in_place=True, waits=False)
)
_basics = HorovodBasics(__file__, "mpi_lib_v2")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(None)
