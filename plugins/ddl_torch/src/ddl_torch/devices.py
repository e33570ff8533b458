"""Says which device is a rank's own, as torch counts them."""

from __future__ import annotations

import torch

from ddlcore.api import local_gpu

__all__ = ["local_device"]


def local_device() -> torch.device:
    """``cuda:<local rank>``; ``cuda:0`` where this rank sees one GPU alone; ``cpu`` where it sees none.

    After ``init()``; any thread. torch counts what CUDA_VISIBLE_DEVICES leaves. Where more ranks than GPUs are on this
    host, the ranks take them in turn, and one warning tells both numbers.
    """
    index = local_gpu(torch.cuda.device_count(), f"torch {torch.__version__}")
    return torch.device("cpu") if index is None else torch.device("cuda", index)
