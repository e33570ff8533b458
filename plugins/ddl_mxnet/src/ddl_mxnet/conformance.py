"""The suite by which the conformance kit tests the adapter for MXNet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import mxnet as mx
import numpy as np
import pytest

import ddl_mxnet  # first, because it patches numpy before MXNet is imported
from ddl_mxnet.adapter import BFLOAT16, MxnetAdapter
from ddlcore.contracts.adapter import Adapter
from ddlcore.testing import AdapterSuite
from ddlcore.types import DType

assert ddl_mxnet.__doc__


class Arrays:
    """The methods by which a test suite converts between NumPy arrays and MXNet arrays, and makes special arrays."""

    adapter: ClassVar[Adapter] = MxnetAdapter()
    dtypes: ClassVar[frozenset[DType]] = frozenset(DType) - {DType.U16, DType.I16}

    @pytest.fixture(autouse=True)
    def numpy_shapes(self) -> Iterator[None]:
        """Switch MXNet to NumPy's shapes in all threads during each test.

        Without these shapes, MXNet has no scalars and no arrays without elements.
        """
        before = mx.util.set_np_shape(2)  # 2: in all threads
        yield
        mx.util.set_np_shape(before)

    def make(self, array: Any) -> Any:
        """Return a new MXNet array with the shape, the element type and the values of the NumPy array ``array``."""
        dtype = BFLOAT16 if array.dtype.name == "bfloat16" else array.dtype
        made = self.adapter.allocate(mx.nd.zeros((1,), dtype=dtype), array.shape)
        if dtype == BFLOAT16 and array.size:
            made[:] = mx.nd.array(array.astype(np.float32)).astype(BFLOAT16)
        elif array.size:
            made._sync_copyfrom(np.array(array, order="C"))
        return made

    def to_numpy(self, tensor: Any) -> Any:
        """Wait until MXNet has computed ``tensor``, and return its values as a NumPy array."""
        if tensor.dtype == BFLOAT16:
            import ml_dtypes

            return tensor.astype("float32").asnumpy().astype(ml_dtypes.bfloat16)
        return tensor.asnumpy()

    def permuted(self, tensor: Any) -> Any:
        """Return None, because MXNet has no transposed views: its arrays are always row-major."""
        return None

    def sliced(self, tensor: Any) -> Any:
        """Return None, because MXNet arrays have no gaps between their elements."""
        return None

    def unsupported(self) -> Any:
        """Return a sparse array, which the adapter must refuse."""
        return mx.nd.zeros((3,)).tostype("row_sparse")


class MxnetSuite(Arrays, AdapterSuite):
    """The suite of the adapter for MXNet, which `ddl conform mxnet` runs.

    The suite tests the collectives of ``Operations``, which first wait until MXNet has computed the arrays.
    """
