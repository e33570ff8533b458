"""Horovod for Keras, on ddl: everything that a training script imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddl_horovod.beginning import (
    init,
)
from ddl_horovod.keras_gradients import (
    load_model,
    reduces_in_compute_gradients,
)
from ddl_horovod.keras_values import (
    allgather,
    broadcast,
    reducescatter,
)
from ddl_horovod.keras_values import (
    allreduce as _allreduce,
)
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
    shutdown,
    size,
)
from ddlcore.types import (
    Adasum,
    Average,
    Sum,
)
from horovod.keras import (
    callbacks,
    elastic,
)
from horovod.tensorflow.compression import (
    Compression,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
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
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
) -> Any:
    """Make ``optimizer`` step on reduced gradients, and return it; see ``ddl_tf.keras.DistributedOptimizer``."""
    wrapped = _keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups=num_groups,
        groups=groups,
    )
    return reduces_in_compute_gradients(wrapped)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Do the same, but keep the variables of ``local_layers`` local; see ``ddl_tf.keras.PartialDistributedOptimizer``."""
    wrapped = _keras.PartialDistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        local_layers=local_layers,
        scale_local_gradients=scale_local_gradients,
    )
    return reduces_in_compute_gradients(wrapped)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the values of all ranks combined. ``op`` takes precedence over ``average``."""
    if op is None:
        op = Average if average is None or average else Sum
    return _allreduce(value, name, None, prescale_factor, postscale_factor, op, compression)
