"""Tells the conformance kit how to convert between NumPy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ddl_conform.process_groups import ProcessGroupSuite

from ddl_torch.adapter import TorchAdapter
from ddlcore.testing import ELEMENTS, AdapterSuite


class TorchSuite(AdapterSuite, ProcessGroupSuite):
    """The tests of the conformance kit for torch's tensors and for the backend ``ddl``; `ddl conform torch` runs them."""

    group_backend = "ddl"
    adapter = TorchAdapter()
    elements = ELEMENTS - {"float8_e4m3b11fnuz"}

    def make(self, array: Any) -> torch.Tensor:
        name = array.dtype.name
        if name == "bfloat16" or name.startswith("float8"):  # torch does not accept the types of ml_dtypes
            raw = np.array(array).view(f"i{array.itemsize}")
            return torch.from_numpy(raw).view(getattr(torch, name))
        return torch.from_numpy(np.array(array))

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bfloat16" or name.startswith("float8"):
            import ml_dtypes

            raw = tensor.contiguous().view(torch.int8 if tensor.itemsize == 1 else torch.int16)
            return raw.numpy().view(getattr(ml_dtypes, name))
        return tensor.numpy()

    def unsupported(self) -> torch.Tensor:
        """Return a tensor of complex numbers of 32 bits."""
        return torch.zeros(3, dtype=torch.complex32)
