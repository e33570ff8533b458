"""Decides which device names are understood: collectives run where a transport reaches, which is the host."""

from __future__ import annotations

import re

__all__ = ["HOST", "check_device"]

HOST = "/cpu:0"
_HOST = re.compile(r"|(/job:[^/:]+)?(/replica:\d+)?(/task:\d+)?/?(device:)?cpu(:(0|\*))?", re.IGNORECASE)


def check_device(device: str, argument: str) -> None:
    """ValueError unless ``device`` means this host: '', 'cpu', '/cpu:0', '/device:CPU:0' and their like."""
    if not isinstance(device, str) or not _HOST.fullmatch(device):
        raise ValueError(
            f"{argument}={device!r}: no installed transport reaches this device; use '' or '/cpu:0', "
            "and TensorFlow brings the tensor there and back"
        )
