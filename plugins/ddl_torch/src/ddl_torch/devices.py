"""Finds the device of this rank, as torch numbers devices."""

from __future__ import annotations

import torch

from ddlcore.api import local_gpu


def local_device() -> torch.device:
    """Return the device of this rank: ``cuda:<local rank>``, or ``cpu`` if this rank sees no GPU.

    If this rank sees only one GPU, the device is ``cuda:0``. Call this function after ``init()``, from any thread.
    torch numbers only the GPUs that CUDA_VISIBLE_DEVICES leaves visible. If a host has more ranks than GPUs, the GPUs
    are assigned to the ranks in turn, so ranks share GPUs. Then ddl logs one warning, with the number of ranks and the
    number of GPUs.
    """
    index = local_gpu(torch.cuda.device_count(), f"torch {torch.__version__}")
    return torch.device("cpu") if index is None else torch.device("cuda", index)
