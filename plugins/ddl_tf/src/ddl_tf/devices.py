"""Decides which device names are understood: collectives run where a transport reaches, which is the host."""

from __future__ import annotations

import logging
import re

import tensorflow as tf

from ddlcore.api import local_gpu, log_once
from ddlcore.errors import InvalidArgument

__all__ = ["HOST", "check_device", "is_host", "local_device", "tell_of_graphs"]

HOST = "/cpu:0"
_HOST = re.compile(r"|(/job:[^/:]+)?(/replica:\d+)?(/task:\d+)?/?(device:)?cpu(:(0|\*))?", re.IGNORECASE)


def check_device(device: str, argument: str) -> None:
    """ValueError unless ``device`` means this host: '', 'cpu', '/cpu:0', '/device:CPU:0' and their like."""
    if not isinstance(device, str) or not _HOST.fullmatch(device):
        raise InvalidArgument(
            f"{argument}={device!r}: use '' (a tensor is reduced where it is, if a transport serves that) or '/cpu:0' "
            "(TensorFlow brings it there and back)"
        )


def is_host(device: str) -> bool:
    """Whether a name that ``check_device`` has passed says that tensors go by way of this host."""
    return "cpu" in device.lower()


def local_device() -> str:
    """``/gpu:<local rank>``; ``/gpu:0`` where this rank sees one GPU alone; ``/cpu:0`` where it sees none.

    After ``init()``; any thread. What ``tf.config.set_visible_devices`` and CUDA_VISIBLE_DEVICES leave counts. Where more
    ranks than GPUs are on this host, the ranks take them in turn, and one warning tells both numbers.
    """
    index = local_gpu(len(tf.config.get_visible_devices("GPU")), f"TensorFlow {tf.__version__}")
    return HOST if index is None else f"/gpu:{index}"


def tell_of_graphs(
    what: str = "tensors that a verb takes", why: str = "TensorFlow runs what may wait only there"
) -> None:
    """Logs, once, which tensors of graphs are staged on the host though there are GPUs; nothing where there is none."""
    if tf.config.get_visible_devices("GPU"):
        log_once(logging.INFO, f"in graphs, {what} are staged on the host: {why}")
