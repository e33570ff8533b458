"""Tells the conformance kit how to convert between NumPy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ddl_torch.adapter import TorchAdapter
from ddlcore.testing import AdapterSuite


class TorchSuite(AdapterSuite):
    """The adapter tests of the conformance kit for torch; `ddl conform torch` runs them."""

    adapter = TorchAdapter()

    def make(self, array: Any) -> torch.Tensor:
        if array.dtype.name == "bfloat16":  # torch does not accept the type of ml_dtypes
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bfloat16:
            import ml_dtypes

            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()
