"""Data-parallel training: the core, and its verbs for numpy arrays.

Packages for frameworks offer the same verbs for their tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddlcore.api import (
    Handle,
    ProcessSet,
    Stats,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_device,
    local_rank,
    local_size,
    poll,
    process_sets,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
    synchronize,
)
from ddlcore.api.arrays import (
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
from ddlcore.errors import (
    Closed,
    DdlInternalError,
    DeadlineExceeded,
    HorovodInternalError,
    MismatchError,
    NotInitialized,
    ObjectDigestError,
    PeerLost,
    PluginError,
    RankFailed,
    ReentrantCall,
    TransportError,
)
from ddlcore.job import VERSION as __version__
from ddlcore.types import Adasum, Average, Max, Min, Product, ReduceOp, Sum

if TYPE_CHECKING:
    from ddlcore.launch.function import run

__all__ = [
    "Adasum",
    "Average",
    "Closed",
    "DdlInternalError",
    "DeadlineExceeded",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitialized",
    "ObjectDigestError",
    "PeerLost",
    "PluginError",
    "ProcessSet",
    "Product",
    "RankFailed",
    "ReduceOp",
    "ReentrantCall",
    "Stats",
    "Sum",
    "TransportError",
    "__version__",
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
    "cross_rank",
    "cross_size",
    "global_process_set",
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
    "poll",
    "process_sets",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """``run`` brings the launcher with it, and is imported when it is first asked for."""
    if name == "run":
        from ddlcore.launch.function import run

        return run
    raise AttributeError(f"module 'ddlcore' has no attribute {name!r}")
