"""What the conformance kit is told of JAX's arrays: how they are made of numpy's, and numpy's of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ddl_jax.adapter import JaxAdapter
from ddlcore.testing import AdapterSuite

__all__ = ["JaxSuite"]

jax.config.update("jax_enable_x64", True)  # else there is no float64 and no int64


class JaxSuite(AdapterSuite):
    """`ddl conform jax` runs it."""

    adapter = JaxAdapter()

    def make(self, array: Any) -> Any:
        return jax.numpy.array(array)

    def to_numpy(self, tensor: Any) -> Any:
        return np.array(jax.device_get(tensor))

    def permuted(self, tensor: Any) -> Any:
        return None  # a transposed array is a new one

    def sliced(self, tensor: Any) -> Any:
        return None  # so is a slice
