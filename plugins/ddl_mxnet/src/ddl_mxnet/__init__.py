"""MXNet for ddl: everything that a training script imports, under Horovod's names."""

# ruff: noqa: E402  # numpy is mended before anything imports MXNet
from __future__ import annotations

from ddl_mxnet.version import mend_numpy

mend_numpy()

from ddl_mxnet.broadcast import broadcast_parameters
from ddl_mxnet.ops import allreduce_
from ddl_mxnet.optimizer import DistributedOptimizer
from ddl_mxnet.trainer import DistributedTrainer
from ddlcore.api import ProcessSet, add_process_set, init, rank, shutdown, size, stats
from ddlcore.types import Average, Max, Min, Product, Sum

__all__ = [
    "Average",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allreduce_",
    "broadcast_parameters",
    "init",
    "rank",
    "shutdown",
    "size",
    "stats",
]
