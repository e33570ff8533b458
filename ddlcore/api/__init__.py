"""The public functions of ddl. The packages for frameworks are built on these functions."""

from __future__ import annotations

from ddlcore.api.arguments import UserCompressor, gradient_compression, resolve_op, wire_compression
from ddlcore.api.beginning import init
from ddlcore.api.build_questions import BuildQuestions
from ddlcore.api.calls import CollectiveCall
from ddlcore.api.compression import FloatCompression, NoCompression
from ddlcore.api.ending import shutdown
from ddlcore.api.gpus import Gpus, installed_gpus, local_device, local_gpu, log_once, visible_gpus
from ddlcore.api.handles import Mapped, Waitable, poll, synchronize
from ddlcore.api.objects import allgather_object, barrier, broadcast_object, join
from ddlcore.api.operations import Operations
from ddlcore.api.process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_sets,
    remove_process_set,
)
from ddlcore.api.reductions import Membership, check_predivide, find_process_set, membership, wait_for_all
from ddlcore.api.replicas import Replica, Verifier, array_replica, named, verify, verify_replicas
from ddlcore.api.stopping import request_stop, should_stop
from ddlcore.api.transports import built, built_version, enabled, threads_supported
from ddlcore.api.weighted import Arithmetic, Weighed, weigh, weighted_average_async
from ddlcore.api.weights import Share, Weight, average_by, check_weighted, checked_weight, reciprocal_of
from ddlcore.api.world import (
    cross_rank,
    cross_size,
    current_job,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
    start_timeline,
    stats,
    stop_timeline,
    use_job,
)
from ddlcore.contracts.framework import Companion
from ddlcore.process.job import Job
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.meter import Stats

__all__ = [
    "Arithmetic",
    "BuildQuestions",
    "CollectiveCall",
    "Companion",
    "FloatCompression",
    "Gpus",
    "Handle",
    "Job",
    "Mapped",
    "Membership",
    "NoCompression",
    "Operations",
    "ProcessSet",
    "Replica",
    "Share",
    "Stats",
    "UserCompressor",
    "Verifier",
    "Waitable",
    "Weighed",
    "Weight",
    "add_process_set",
    "allgather_object",
    "array_replica",
    "average_by",
    "barrier",
    "broadcast_object",
    "built",
    "built_version",
    "check_predivide",
    "check_weighted",
    "checked_weight",
    "cross_rank",
    "cross_size",
    "current_job",
    "enabled",
    "find_process_set",
    "global_process_set",
    "gradient_compression",
    "init",
    "installed_gpus",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_device",
    "local_gpu",
    "local_rank",
    "local_size",
    "log_once",
    "membership",
    "named",
    "poll",
    "process_sets",
    "rank",
    "reciprocal_of",
    "remove_process_set",
    "request_stop",
    "resolve_op",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "threads_supported",
    "use_job",
    "verify",
    "verify_replicas",
    "visible_gpus",
    "wait_for_all",
    "weigh",
    "weighted_average_async",
    "wire_compression",
]
