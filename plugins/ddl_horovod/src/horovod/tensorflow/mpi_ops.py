"""The collectives for TensorFlow's tensors, and the world that they run in."""

from __future__ import annotations

from ddl_horovod.beginning import (
    init,
)
from ddl_horovod.process_sets import ProcessSet, add_process_set
from ddl_horovod.timelines import (
    start_timeline,
    stop_timeline,
)
from ddl_tf import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    grouped_allgather,
    join,
    local_rank_op,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    rocm_built,
    size_op,
)

from ddlcore.api import (
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
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
    num_rank_is_power_2,
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
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_installed_version",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "process_set_included_op",
    "rank",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_basics = HorovodBasics(__file__, "mpi_lib_v2")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(None)


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raise NotImplementedError if ``num_rank`` is not a power of two."""
    if not num_rank_is_power_2(num_rank):
        raise NotImplementedError(f"Adasum needs a number of ranks that is a power of two, not {num_rank}")
