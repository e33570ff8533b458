"""MXNet for ddl: everything that a training script imports, under Horovod's names."""

# ruff: noqa: E402  # numpy is mended before anything imports MXNet
from __future__ import annotations

from ddl_mxnet.version import mend_numpy

mend_numpy()

from ddl_mxnet.ops import allreduce_
from ddlcore.api import init, rank, shutdown, size
from ddlcore.types import Average, Max, Min, Product, Sum

__all__ = ["Average", "Max", "Min", "Product", "Sum", "allreduce_", "init", "rank", "shutdown", "size"]
