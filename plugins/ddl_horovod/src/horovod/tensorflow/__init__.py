"""Horovod for TensorFlow, on ddl: everything that a training script imports."""

# ruff: noqa: E402  # a missing package is reported first, in one line
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from ddl_horovod.original import needs

needs("ddl_tf", "horovod.tensorflow")

import ddl_tf
from ddl_horovod import tf_adasum
from ddl_horovod.choosing import with_adasum
from ddl_tf import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
    grouped_reducescatter,
    reducescatter,
)

from horovod.common.util import (
    check_extension,
    split_list,
)
from horovod.tensorflow import (
    elastic,
)
from horovod.tensorflow.compression import (
    Compression,
)
from horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    grouped_allgather,
    handle_average_backwards_compatibility,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.util import (
    refs_to_vars,
    vars_to_refs,
)

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
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
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "vars_to_refs",
]

allreduce = with_adasum(ddl_tf.allreduce, tf_adasum.allreduce)
grouped_allreduce = with_adasum(ddl_tf.grouped_allreduce, tf_adasum.grouped_allreduce)
DistributedGradientTape = with_adasum(ddl_tf.DistributedGradientTape, tf_adasum.tape_of)
PartialDistributedGradientTape = with_adasum(ddl_tf.PartialDistributedGradientTape, tf_adasum.tape_of)
DistributedOptimizer = with_adasum(ddl_tf.DistributedOptimizer, tf_adasum.optimizer_of)

if TYPE_CHECKING:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization


def __getattr__(name: str) -> Any:
    """Import ``SyncBatchNormalization``, which needs Keras, when it is first used."""
    if name == "SyncBatchNormalization":
        return import_module("horovod.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))
