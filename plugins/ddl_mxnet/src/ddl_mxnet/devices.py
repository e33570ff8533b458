"""Tells which device belongs to this rank, as MXNet numbers devices, and stages GPU arrays on the host.

MXNet does not expose the streams on which it computes, so other code cannot order its work on GPU memory with MXNet's.
Therefore MXNet itself copies the arrays, and orders these copies with its other work: to the host before a collective,
and back after it.
"""

from __future__ import annotations

import logging
from typing import Any

import mxnet as mx

from ddlcore.api import local_gpu, log_once


def local_device() -> Any:
    """Return the device of this rank: ``mx.gpu(<local rank>)``, or ``mx.cpu()`` if this rank sees no GPU.

    If this rank sees only one GPU, it is ``mx.gpu(0)``. Call it after ``init()``, from any thread. If a host has more
    ranks than GPUs, the ranks share the GPUs in turn, and one warning states both numbers.
    """
    index = local_gpu(mx.context.num_gpus(), f"MXNet {mx.__version__}")
    return mx.cpu() if index is None else mx.gpu(index)


def is_on_gpu(array: Any) -> bool:
    """Return whether ``array`` is on a GPU, so that it must be staged on the host for a collective."""
    return _is_gpu(array.ctx)


def _is_gpu(context: Any) -> bool:
    return bool(context.device_type == "gpu")


def on_host(array: Any) -> Any:
    """Return a copy of a GPU array in host memory; MXNet's engine copies the values in the background."""
    log_once(logging.INFO, "arrays on a GPU are staged on the host: MXNet shows nobody the streams that it computes on")
    return array.as_in_context(mx.cpu())
