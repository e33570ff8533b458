"""What the kernels must give, by numpy, one operand after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ddlcore.types import DType, ReduceOp

__all__ = ["OPS", "SPECIALS", "Array", "native", "numbers", "reduced", "same", "scaled", "shifted"]

Array = np.ndarray[Any, Any]
OPS = (ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
SPECIALS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 6e-8, 1e-40, 65504.0, 65520.0, 3e38)


def native(dtype: DType) -> Any:
    """The numpy type that holds ``dtype``."""
    return ml_dtypes.bfloat16 if dtype is DType.BF16 else np.dtype(dtype.label)


def numbers(dtype: DType, count: int, seed: int) -> Array:
    """Random values of the type, NaN and infinities among the floats, extremes among the integers."""
    random = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return random.integers(0, 2, count).astype(bool)
    if not dtype.is_float:
        limits = np.iinfo(native(dtype))
        return random.integers(limits.min, limits.max, count, native(dtype), endpoint=True)
    values = random.normal(0, 4, count)
    values[random.random(count) < 0.1] = random.choice(SPECIALS)
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(native(dtype)))


def _wide(x: Array, dtype: DType) -> Array:
    return x.astype(np.float32) if dtype in (DType.F16, DType.BF16) else x


def scaled(x: Array, dtype: DType, scale: float) -> Array:
    """scale * x, in x's wide type; integers by way of float64, truncated, wrapped; a bool is whether it is not 0."""
    if dtype.is_float:
        return np.asarray(x * x.dtype.type(scale))
    if scale == 1.0:
        return x
    if dtype is DType.BOOL:
        return np.asarray(x.astype(np.float64) * scale != 0)
    return np.asarray(np.trunc(x.astype(np.float64) * scale).astype(np.int64).astype(x.dtype))


def reduced(sources: Sequence[Array], dtype: DType, op: ReduceOp, prescale: float = 1.0, scale: float = 1.0) -> Array:
    """scale * (prescale * s0 op prescale * s1 op …), 16-bit floats in float32 and rounded once."""
    combine: Any = {
        ReduceOp.Sum: np.add, ReduceOp.Min: np.minimum, ReduceOp.Max: np.maximum, ReduceOp.Product: np.multiply
    }[op]  # fmt: skip
    with np.errstate(all="ignore"):
        total = scaled(_wide(sources[0], dtype), dtype, prescale)
        for source in sources[1:]:
            total = combine(total, scaled(_wide(source, dtype), dtype, prescale))
        return np.asarray(scaled(total, dtype, scale).astype(native(dtype)))


def same(actual: Array, expected: Array) -> None:
    """Bit for bit, but that a NaN is a NaN and a zero a zero."""
    assert actual.dtype == expected.dtype
    if actual.dtype == ml_dtypes.bfloat16:
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


def shifted(x: Array, by: int) -> Array:
    """A copy of ``x`` that begins ``by`` bytes behind a cache line: aligned to nothing."""
    raw = np.zeros(x.nbytes + 64 + by, np.uint8)
    begin = -raw.ctypes.data % 64 + by
    copy: Array = raw[begin : begin + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy
