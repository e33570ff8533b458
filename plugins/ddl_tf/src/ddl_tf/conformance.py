"""What the conformance kit is told of TensorFlow's tensors: how they are made of arrays, and arrays of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf.adapter import TfAdapter
from ddlcore.testing import AdapterSuite

__all__ = ["TfSuite"]


class TfSuite(AdapterSuite):
    """`ddl conform tensorflow` runs it."""

    adapter = TfAdapter()

    def make(self, array: Any) -> Any:
        return tf.identity(tf.constant(array))  # a constant may be one of several that share memory

    def to_numpy(self, tensor: Any) -> Any:
        return np.array(tensor.numpy())

    def permuted(self, tensor: Any) -> Any:
        return None

    def sliced(self, tensor: Any) -> Any:
        return None
