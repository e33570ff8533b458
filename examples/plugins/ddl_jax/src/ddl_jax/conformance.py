"""The conformance suite of the JAX adapter: converts numpy's arrays to JAX's and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ddl_jax.adapter import JaxAdapter
from ddlcore.testing import AdapterSuite

__all__ = ["JaxSuite"]

jax.config.update("jax_enable_x64", True)  # otherwise JAX has no float64 and no int64


class JaxSuite(AdapterSuite):
    """The suite that `ddl conform jax` runs."""

    adapter = JaxAdapter()

    def make(self, array: Any) -> Any:
        return jax.numpy.array(array)

    def to_numpy(self, tensor: Any) -> Any:
        return np.array(jax.device_get(tensor))

    def permuted(self, tensor: Any) -> Any:
        return None  # transposing makes a new array

    def sliced(self, tensor: Any) -> Any:
        return None  # slicing makes a new array
