"""What the conformance kit is told of MXNet's arrays: how they are made of numpy's, and numpy's of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import mxnet as mx
import numpy as np
import pytest

import ddl_mxnet  # numpy is mended before MXNet comes
from ddl_mxnet.adapter import BFLOAT16, MxnetAdapter
from ddlcore.contracts.adapter import Adapter
from ddlcore.testing import AdapterSuite
from ddlcore.types import DType

__all__ = ["Arrays", "MxnetSuite"]

assert ddl_mxnet.__doc__


class Arrays:
    """What suites make their tensors by."""

    adapter: ClassVar[Adapter] = MxnetAdapter()
    dtypes: ClassVar[frozenset[DType]] = frozenset(DType) - {DType.U16, DType.I16}

    @pytest.fixture(autouse=True)
    def numpy_shapes(self) -> Iterator[None]:
        """Scalars and arrays without elements are MXNet's only where it is told so; in every thread of the tests."""
        before = mx.util.set_np_shape(2)  # in all threads
        yield
        mx.util.set_np_shape(before)

    def make(self, array: Any) -> Any:
        """A new array with the same shape, type and values."""
        dtype = BFLOAT16 if array.dtype.name == "bfloat16" else array.dtype
        made = self.adapter.allocate(mx.nd.zeros((1,), dtype=dtype), array.shape)
        if dtype == BFLOAT16 and array.size:
            made[:] = mx.nd.array(array.astype(np.float32)).astype(BFLOAT16)
        elif array.size:
            made._sync_copyfrom(np.array(array, order="C"))
        return made

    def to_numpy(self, tensor: Any) -> Any:
        """The values, waited for."""
        if tensor.dtype == BFLOAT16:
            import ml_dtypes

            return tensor.astype("float32").asnumpy().astype(ml_dtypes.bfloat16)
        return tensor.asnumpy()

    def permuted(self, tensor: Any) -> Any:
        """None: MXNet's arrays are always row-major."""
        return None

    def sliced(self, tensor: Any) -> Any:
        """None: they have no gaps."""
        return None

    def unsupported(self) -> Any:
        """A sparse one."""
        return mx.nd.zeros((3,)).tostype("row_sparse")


class MxnetSuite(Arrays, AdapterSuite):
    """`ddl conform mxnet` runs it: every verb waits for the arrays first."""
