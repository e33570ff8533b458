"""ddl for MXNet: all functions and classes that a training script needs.

If Horovod has the same function or class, the name is the same as in Horovod.
"""

# ruff: noqa: E402  # numpy must be patched, and MXNet imported, before the imports below
from __future__ import annotations

from ddl_mxnet.version import require_mxnet

require_mxnet()

from ddl_mxnet import elastic
from ddl_mxnet.broadcast import broadcast_parameters
from ddl_mxnet.built import (
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
from ddl_mxnet.compression import Compression
from ddl_mxnet.devices import local_device
from ddl_mxnet.joining import join, remove_process_set
from ddl_mxnet.objects import allgather_object, broadcast_object
from ddl_mxnet.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ddl_mxnet.optimizer import DistributedOptimizer
from ddl_mxnet.replicas import verify
from ddl_mxnet.trainer import DistributedTrainer
from ddlcore.api import (
    ProcessSet,
    Share,
    Stats,
    add_process_set,
    barrier,
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
    "Compression",
    "DdlInternalError",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReplicasDiffer",
    "Share",
    "Stats",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_device",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "request_stop",
    "rocm_built",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "verify",
]
