"""Reducing memory gives what numpy gives, for every type, op, length, alignment and scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import DType, ReduceOp
from tests.kernels.reference import OPS, Array, native, numbers, reduced, same, shifted

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
EVERY_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
COUNTS = (0, 1, 2, 31, 32, 33, 95, 2047, 2048, 2049, 5003)  # around one vector and one block


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def _run(
    kernels: CpuKernels, sources: list[Array], dtype: DType, op: ReduceOp, prescale: float = 1.0, scale: float = 1.0
) -> Array:
    target = np.empty_like(sources[0])
    addresses = [source.ctypes.data for source in sources]
    kernels.reduce(addresses, target.ctypes.data, target.size, dtype, op, scale=scale, prescale=prescale)
    return target


@DTYPES
@EVERY_OP
def test_equals_numpy(kernels: CpuKernels, dtype: DType, op: ReduceOp) -> None:
    """One to five operands of lengths around the vector's and the block's."""
    for count in COUNTS:
        for n in (1, 2, 3, 5):
            sources = [numbers(dtype, count, seed) for seed in range(n)]
            same(_run(kernels, sources, dtype, op), reduced(sources, dtype, op))


@DTYPES
@EVERY_OP
def test_memory_aligned_to_nothing(kernels: CpuKernels, dtype: DType, op: ReduceOp) -> None:
    """Odd addresses give the same as even ones, and what surrounds the target is left alone."""
    sources = [shifted(numbers(dtype, 333, seed), 1 + 2 * seed) for seed in range(3)]
    raw = np.full(333 * dtype.itemsize + 64, 0xA5, np.uint8)
    target = raw[5 : 5 + 333 * dtype.itemsize].view(native(dtype))
    kernels.reduce([s.ctypes.data for s in sources], target.ctypes.data, 333, dtype, op)
    same(target.copy(), reduced(sources, dtype, op))
    assert (raw[:5] == 0xA5).all()
    assert (raw[5 + target.nbytes :] == 0xA5).all()


@DTYPES
@pytest.mark.parametrize(("prescale", "scale"), [(1.0, 0.5), (0.25, 1.0), (0.75, 1.5), (3.0, 1 / 3)])
def test_scales(kernels: CpuKernels, dtype: DType, prescale: float, scale: float) -> None:
    """Each operand is prescaled, the result scaled; floats in their wide type, integers by way of float64."""
    for op in OPS:
        for n in (1, 2, 4):
            sources = [_moderate(numbers(dtype, 2500, seed), dtype) for seed in range(n)]
            result = _run(kernels, sources, dtype, op, prescale, scale)
            same(result, reduced(sources, dtype, op, prescale, scale))


def _moderate(x: Array, dtype: DType) -> Array:
    """Integers whose products fit 53 bits: what exceeds int64 in float64 has no right answer in numpy."""
    return x if dtype.is_float or dtype is DType.BOOL else np.asarray(x % 64, native(dtype))


@pytest.mark.parametrize("dtype", [DType.I64, DType.U8], ids=lambda dtype: dtype.label)
def test_scaled_integers_beyond_int64(kernels: CpuKernels, dtype: DType) -> None:
    """Too large a product saturates at the limits of int64 before it is stored, on every machine alike."""
    source = np.full(40, np.iinfo(native(dtype)).max, native(dtype))
    up = _run(kernels, [source], dtype, ReduceOp.Sum, scale=1e30)
    assert (up == np.array(2**63 - 1).astype(native(dtype))).all()


@DTYPES
@pytest.mark.parametrize("place", range(4))
def test_target_is_one_of_the_sources(kernels: CpuKernels, dtype: DType, place: int) -> None:
    """Nothing is overwritten before it was read, whichever operand the target is."""
    sources = [numbers(dtype, 5003, seed) for seed in range(4)]
    expected = reduced(sources, dtype, ReduceOp.Sum)
    addresses = [source.ctypes.data for source in sources]
    kernels.reduce(addresses, addresses[place], 5003, dtype, ReduceOp.Sum)
    same(sources[place], expected)


def test_sixteen_bit_floats_are_rounded_once(kernels: CpuKernels) -> None:
    """1 + 2^-11 + 2^-11 + … in float16: rounded at each step it would stay 1."""
    ones = np.ones(100, np.float16)
    dust = np.full(100, 2.0**-11, np.float16)
    result = _run(kernels, [ones, dust, dust, dust, dust], DType.F16, ReduceOp.Sum)
    assert (result == np.float16(1 + 2.0**-9)).all()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.Min, ReduceOp.Max], ids=lambda op: op.name)
def test_nan_wins(kernels: CpuKernels, dtype: DType, op: ReduceOp) -> None:
    """A NaN in any operand is the result: a broken gradient must not vanish."""
    for place in range(3):
        sources = [np.ones(40, native(dtype)) for _ in range(3)]
        sources[place][7] = np.nan
        result = _run(kernels, sources, dtype, op).astype(np.float64)
        assert np.isnan(result[7])
        assert (np.delete(result, 7) == 1).all()


@DTYPES
@EVERY_OP
def test_identity_changes_nothing(kernels: CpuKernels, dtype: DType, op: ReduceOp) -> None:
    """What a joined rank brings leaves every value as it is, infinities included."""
    for count in (0, 1, 1000):
        values = numbers(dtype, count, 3)
        identity = np.empty_like(values)
        kernels.fill_identity(identity.ctypes.data, count, dtype, op)
        same(_run(kernels, [values, identity], dtype, op), values)
        same(_run(kernels, [identity, values], dtype, op), values)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DType)),
    op=st.sampled_from(OPS),
    count=st.integers(0, 4200),
    n=st.integers(1, 6),
    seed=st.integers(0, 2**20),
    cut=st.integers(0, 4200),
)
def test_parts_give_the_same_bits(dtype: DType, op: ReduceOp, count: int, n: int, seed: int, cut: int) -> None:
    """Reduced in two parts or in one: element by element the same, bit for bit."""
    kernels = CpuKernels()
    sources = [numbers(dtype, count, seed + k) for k in range(n)]
    whole = _run(kernels, sources, dtype, op, 1.0, 0.5)
    cut = min(cut, count)
    parts = [_run(kernels, [s[a:b].copy() for s in sources], dtype, op, 1.0, 0.5) for a, b in ((0, cut), (cut, count))]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
