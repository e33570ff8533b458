"""Keras for ddl: everything that a training script imports, under Horovod's names. Works with Keras 3 and tf_keras."""

from __future__ import annotations

from ddl_tf.built import (
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
from ddl_tf.compression import Compression
from ddl_tf.devices import local_device
from ddl_tf.keras import callbacks, elastic
from ddl_tf.keras.loading import load_model
from ddl_tf.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ddl_tf.keras.sync_batch_norm import SyncBatchNormalization
from ddl_tf.keras.values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from ddl_tf.replicas import verify
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
    rank,
    remove_process_set,
    request_stop,
    should_stop,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from ddlcore.errors import DdlInternalError, HorovodInternalError, PeerLost, ReplicasDiffer
from ddlcore.types import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DdlInternalError",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
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
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_device",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "request_stop",
    "rocm_built",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "verify",
]
