"""The collectives for MXNet's arrays, and the world that they run in."""

from __future__ import annotations

from ddl_horovod.beginning import (
    init,
)
from ddl_horovod.process_sets import ProcessSet, add_process_set
from ddl_horovod.timelines import (
    start_timeline,
    stop_timeline,
)
from ddl_mxnet import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    reducescatter,
    remove_process_set,
    rocm_built,
)

from ddlcore.api import (
    cross_rank,
    cross_size,
    global_process_set,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
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
from horovod.common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_installed_version",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_basics = HorovodBasics(__file__, "mpi_lib_v2")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(None)
