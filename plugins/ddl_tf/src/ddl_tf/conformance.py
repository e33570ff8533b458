"""Tells the conformance kit how to convert between NumPy arrays and TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf.adapter import TfAdapter
from ddlcore.testing import ELEMENTS, AdapterSuite


def _is_of_tensors(element: str) -> bool:
    """Return whether this TensorFlow has the type ``element``; older releases lack some floats of 8 bits."""
    try:
        tf.as_dtype(element)
    except TypeError:
        return False
    return True


class TfSuite(AdapterSuite):
    """The adapter tests of the conformance kit for TensorFlow; `ddl conform tensorflow` runs them."""

    adapter = TfAdapter()
    elements = frozenset(filter(_is_of_tensors, ELEMENTS - {"float8_e8m0fnu"}))

    def make(self, array: Any) -> Any:
        if array.dtype.name.startswith("float8"):
            return tf.convert_to_tensor(array)
        return tf.identity(tf.constant(array))  # several constants may share memory

    def to_numpy(self, tensor: Any) -> Any:
        return np.array(tensor.numpy())

    def unsupported(self) -> Any:
        """Return a tensor of texts."""
        return tf.constant(["one", "two"])

    def permuted(self, tensor: Any) -> Any:
        return None

    def sliced(self, tensor: Any) -> Any:
        return None
