"""Horovod for Keras within TensorFlow, on ddl: everything that a training script imports."""

from __future__ import annotations

from ddl_horovod.beginning import (
    init,
)
from ddl_horovod.keras_gradients import (
    load_model,
    reducing_in_compute_gradients,
)
from ddl_horovod.keras_values import (
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from ddl_horovod.process_sets import ProcessSet, add_process_set
from ddl_horovod.timelines import (
    start_timeline,
    stop_timeline,
)
from ddl_tf import keras as _keras
from ddl_tf.keras import (
    broadcast_global_variables,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
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
    remove_process_set,
    shutdown,
    size,
)
from ddlcore.types import (
    Average,
    Sum,
)
from horovod.common.util import (
    is_version_greater_equal_than,
)
from horovod.tensorflow.compression import (
    Compression,
)
from horovod.tensorflow.keras import (
    callbacks,
    elastic,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_version_greater_equal_than",
    "load_model",
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

DistributedOptimizer = reducing_in_compute_gradients(_keras.DistributedOptimizer)
