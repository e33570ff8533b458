"""The results that the kernels must give, computed by numpy in float64, and memory at every alignment."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ddlcore.types import DType, ReduceOp

__all__ = ["Array", "Fenced", "at", "combined", "native", "near", "numbers", "rounded"]

Array = np.ndarray[Any, Any]
FENCE = 0xA5  # the content of memory around a kernel's target, before and after


def native(dtype: DType) -> Any:
    """Return the numpy type for ``dtype``."""
    return ml_dtypes.bfloat16 if dtype is DType.BF16 else np.dtype(dtype.label)


def numbers(dtype: DType, count: int, seed: int) -> Array:
    """Return values so small that adding or multiplying three of them and halving the result fits the type."""
    random = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return random.integers(0, 2, count).astype(bool)
    if not dtype.is_float:
        low = 0 if dtype in (DType.U8, DType.U16) else -5
        return random.integers(low, 6, count).astype(native(dtype))
    return np.asarray(random.normal(0, 4, count).astype(native(dtype)))


class Fenced:
    """Memory that begins ``alignment`` bytes after a multiple of 16, between guard bytes."""

    def __init__(self, count: int, dtype: DType, alignment: int) -> None:
        nbytes = count * dtype.itemsize
        self._raw = np.full(nbytes + 64, FENCE, np.uint8)
        start = -self._raw.ctypes.data % 16 + 16 + alignment
        self._inside = slice(start, start + nbytes)
        self.array: Array = self._raw[self._inside].view(native(dtype))
        self.address = self._raw.ctypes.data + start
        self.count = count

    def intact(self) -> bool:
        """Return whether nothing outside the memory was written."""
        outside = np.ones(self._raw.size, bool)
        outside[self._inside] = False
        return bool((self._raw[outside] == FENCE).all())


def at(alignment: int, values: Array, dtype: DType) -> Fenced:
    """Return a copy of the values at that alignment."""
    memory = Fenced(values.size, dtype, alignment)
    memory.array[:] = values
    return memory


def rounded(x: Array, dtype: DType) -> Array:
    """Convert float64 to ``dtype``: integers are truncated, and a bool is true if not 0."""
    if dtype is DType.BOOL:
        return np.asarray(x != 0)
    return np.asarray(x.astype(native(dtype)) if dtype.is_float else np.trunc(x).astype(np.int64).astype(native(dtype)))


def combined(values: list[Array], dtype: DType, op: ReduceOp) -> Array:
    """Reduce the values one after the other, in float64."""
    combine: Any = {
        ReduceOp.Sum: np.add, ReduceOp.Min: np.minimum, ReduceOp.Max: np.maximum, ReduceOp.Product: np.multiply
    }[op]  # fmt: skip
    total = values[0].astype(np.float64)
    for value in values[1:]:
        total = combine(total, value.astype(np.float64))
    return np.asarray(total)


def near(actual: Array, expected: Array, dtype: DType) -> None:
    """Assert that the values are equal, except for the rounding of floats.

    16-bit floats are computed in float32 and rounded once.
    """
    exact = actual.astype(np.float64), expected.astype(np.float64)
    step = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.F32: 2.0**-22, DType.F64: 2.0**-51}.get(dtype, 0.0)
    np.testing.assert_allclose(*exact, rtol=step, atol=step * 1e-3)
