"""Finds the MXNet device of this rank, and copies arrays from a GPU to the host for collectives.

MXNet does not reveal the CUDA streams on which it computes. So code outside MXNet cannot know when it may use an array
on a GPU. Therefore MXNet itself copies such arrays, to the host before a collective and back to the GPU after it, and
orders these copies with its other work.
"""

from __future__ import annotations

import logging
from typing import Any

import mxnet as mx

from ddlcore.api import local_gpu, log_once


def local_device() -> Any:
    """Return the device of this rank: ``mx.gpu(<local rank>)``, or ``mx.cpu()`` if this rank sees no GPU.

    If this rank sees only one GPU, the device is ``mx.gpu(0)``. If a host has more ranks than GPUs, several ranks get
    the same GPU, and one warning states both numbers. Call this function after ``init()``, from any thread.
    """
    index = local_gpu(mx.context.num_gpus(), f"MXNet {mx.__version__}")
    return mx.cpu() if index is None else mx.gpu(index)


def is_on_gpu(array: Any) -> bool:
    """Return whether ``array`` is on a GPU. Such an array must be copied to the host for a collective."""
    return _is_gpu(array.ctx)


def _is_gpu(context: Any) -> bool:
    return bool(context.device_type == "gpu")


def on_host(array: Any) -> Any:
    """Return a copy in host memory of ``array``, which is on a GPU.

    The function does not wait: MXNet's engine copies the values in the background.
    """
    log_once(logging.INFO, "arrays on a GPU are staged on the host: MXNet shows nobody the streams that it computes on")
    return array.as_in_context(mx.cpu())
