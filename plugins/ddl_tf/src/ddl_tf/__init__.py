"""TensorFlow for ddl: everything that a training script imports, under Horovod's names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddl_tf import version  # isort: skip  # first, so that a missing TensorFlow is reported in one line
from ddl_tf import elastic
from ddl_tf.broadcast import (
    BroadcastGlobalVariablesHook,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
)
from ddl_tf.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ddl_tf.compression import Compression
from ddl_tf.devices import local_device
from ddl_tf.objects import allgather_object, broadcast_object, broadcast_object_fn
from ddl_tf.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ddl_tf.optimizer import DistributedOptimizer
from ddl_tf.replicas import verify
from ddl_tf.tape import DistributedGradientTape, PartialDistributedGradientTape
from ddlcore.api import (
    ProcessSet,
    Share,
    Stats,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    poll,
    rank,
    remove_process_set,
    request_stop,
    should_stop,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
    synchronize,
)
from ddlcore.errors import DdlInternalError, HorovodInternalError, PeerLost, ReplicasDiffer
from ddlcore.types import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DdlInternalError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReplicasDiffer",
    "Share",
    "Stats",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_device",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "request_stop",
    "rocm_built",
    "should_stop",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "verify",
    "version",
]

if TYPE_CHECKING:
    from ddl_tf.keras import SyncBatchNormalization


def __getattr__(name: str) -> Any:
    """Import a name that needs Keras, at the first use of the name. A script that uses sessions needs no Keras."""
    if name == "SyncBatchNormalization":
        return import_module("ddl_tf.keras").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
