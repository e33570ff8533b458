"""Decides which device names are accepted, and finds the device of this rank.

Collectives run on the device where the tensors are, if a transport serves that device. Otherwise they run on the host.
"""

from __future__ import annotations

import logging
import re

import tensorflow as tf

from ddlcore.api import local_gpu, log_once
from ddlcore.errors import InvalidArgument

HOST = "/cpu:0"
_HOST = re.compile(r"|(/job:[^/:]+)?(/replica:\d+)?(/task:\d+)?/?(device:)?cpu(:(0|\*))?", re.IGNORECASE)


def check_device(device: str, argument: str) -> None:
    """Raise ValueError unless ``device`` names the host's CPU: '', 'cpu', '/cpu:0', '/device:CPU:0' and similar names.

    ``argument`` is the name of the user's argument in the error message.
    """
    if not isinstance(device, str) or not _HOST.fullmatch(device):
        raise InvalidArgument(
            f"{argument}={device!r}: use '' (a tensor is reduced where it is, if a transport serves that) or '/cpu:0' "
            "(TensorFlow copies it to the host and back)"
        )


def is_host(device: str) -> bool:
    """Return whether ``device`` requests that tensors are staged on the host.

    ``device`` is a name that ``check_device`` accepts.
    """
    return "cpu" in device.lower()


def local_device() -> str:
    """Return the device of this rank: ``/gpu:<local rank>``, or ``/cpu:0`` if this rank sees no GPU.

    If this rank sees only one GPU, the device is ``/gpu:0``. Any thread may call this function after ``init()``.
    ``tf.config.set_visible_devices`` and CUDA_VISIBLE_DEVICES decide which GPUs count. If this host has more ranks than
    GPUs, the GPUs are assigned to the ranks in turn, so ranks share GPUs. Then ddl logs one warning, with the number of
    ranks and the number of GPUs.
    """
    index = local_gpu(len(tf.config.get_visible_devices("GPU")), f"TensorFlow {tf.__version__}")
    return HOST if index is None else f"/gpu:{index}"


def tell_of_graphs(
    what: str = "tensors of collectives", why: str = "TensorFlow can run operations that may wait only there"
) -> None:
    """Log, only once, that some tensors in graphs are staged on the host although there are GPUs.

    ``what`` names these tensors and ``why`` gives the reason. Without GPUs, nothing is logged.
    """
    if tf.config.get_visible_devices("GPU"):
        log_once(logging.INFO, f"in graphs, {what} are staged on the host: {why}")
