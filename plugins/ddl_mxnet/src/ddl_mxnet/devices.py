"""Says which device is a rank's own, as MXNet counts them, and stages a GPU's arrays on the host.

MXNet shows nobody the streams that it computes on, so that no one else can work on its GPUs' memory in its order.
Its own copies keep to it: to the host before a collective, and back after it.
"""

from __future__ import annotations

import logging
from typing import Any

import mxnet as mx

from ddlcore.api import local_gpu, log_once

__all__ = ["is_on_gpu", "local_device", "on_host"]


def local_device() -> Any:
    """``mx.gpu(<local rank>)``; ``mx.gpu(0)`` where this rank sees one GPU alone; ``mx.cpu()`` where it sees none.

    After ``init()``; any thread. Where more ranks than GPUs are on this host, the ranks take them in turn, and one
    warning tells both numbers.
    """
    index = local_gpu(mx.context.num_gpus(), f"MXNet {mx.__version__}")
    return mx.cpu() if index is None else mx.gpu(index)


def is_on_gpu(array: Any) -> bool:
    """Whether this array must be staged on the host for a collective."""
    return _is_gpu(array.ctx)


def _is_gpu(context: Any) -> bool:
    return bool(context.device_type == "gpu")


def on_host(array: Any) -> Any:
    """An array in host memory with the values that a GPU's has now, once the engine has copied them."""
    log_once(logging.INFO, "arrays on a GPU are staged on the host: MXNet shows nobody the streams that it computes on")
    return array.as_in_context(mx.cpu())
