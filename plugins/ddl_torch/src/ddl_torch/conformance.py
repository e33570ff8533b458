"""What the conformance kit is told of torch's tensors: how they are made of arrays, and arrays of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ddl_torch.adapter import TorchAdapter
from ddlcore.testing import AdapterSuite

__all__ = ["TorchSuite"]


class TorchSuite(AdapterSuite):
    """`ddl conform torch` runs it."""

    adapter = TorchAdapter()

    def make(self, array: Any) -> torch.Tensor:
        if array.dtype.name == "bfloat16":  # torch does not know ml_dtypes' type
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bfloat16:
            import ml_dtypes

            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()
