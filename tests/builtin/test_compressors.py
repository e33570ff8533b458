"""The built-in compressors: which types they narrow, and that the cast rounds to nearest, once."""

from __future__ import annotations

import numpy as np
import pytest
from ddl_conform.group import Area
from ddl_conform.oracle import numpy_dtype

from ddlcore.builtin.compressors import Bf16Compression, Fp16Compression, Unchanged
from ddlcore.contracts.compressor import Compressor
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import DType


@pytest.mark.parametrize(
    ("compressor", "name", "narrow"),
    [(Unchanged, "none", None), (Fp16Compression, "fp16", DType.F16), (Bf16Compression, "bf16", DType.BF16)],
)
def test_only_wide_floats_are_narrowed(compressor: type[Compressor], name: str, narrow: DType | None) -> None:
    """float32 and float64 travel in 16 bits; whole numbers, bool and 16-bit floats as they are."""
    made = compressor(CpuKernels())
    assert (made.name, made.summable) == (name, True)
    for dtype in DType:
        wide = dtype in (DType.F32, DType.F64)
        assert made.wire_dtype(dtype) is (narrow if wide and narrow is not None else dtype)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("compressor", [Fp16Compression, Bf16Compression])
def test_values_are_scaled_before_they_are_rounded(compressor: type[Compressor], dtype: DType) -> None:
    """The wire holds round(scale * x), not scale * round(x)."""
    made = compressor(CpuKernels())
    wire = numpy_dtype(made.wire_dtype(dtype))
    values = np.linspace(-3, 3, 1001).astype(numpy_dtype(dtype))
    source, target = Area(values), Area(np.zeros(1001, wire))
    made.encode("t", source.buffer, target.buffer, 1 / 3)
    expected = (values * values.dtype.type(1 / 3)).astype(np.float32).astype(wire)
    apart = np.abs(target.array.view(np.uint16).astype(int) - expected.view(np.uint16).astype(int))
    assert (apart <= 1).all()  # float64 may be rounded by way of float32 or not
    assert (apart == 0).mean() > 0.99
