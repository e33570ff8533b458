"""Tests of every kernel, for every type and alignment, in numba's simulator, against numpy in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
from ddl_nccl.cuda.buckets import CudaKernels
from ddl_nccl.cuda.chunks import LEAST_BYTES
from ddl_nccl.cuda.simulate import Simulated

from ddlcore.types import DType, Max, Min, Product, ReduceOp, Sum
from plugins.ddl_nccl.tests.cuda.oracle import Array, Fenced, at, combined, native, near, numbers, rounded
from tests.tiers import long

# The type to which each type is cast and from which it is cast back.
OTHER = {
    DType.U8: DType.I32, DType.I8: DType.I32, DType.U16: DType.I32, DType.I16: DType.I32, DType.I32: DType.I64,
    DType.I64: DType.F64, DType.F16: DType.F32, DType.BF16: DType.F32, DType.F32: DType.BF16, DType.F64: DType.F16,
    DType.BOOL: DType.U8,
}  # fmt: skip
OPS = (Sum, Min, Max, Product)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::numba.NumbaWarning"),
]
every_dtype = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
every_alignment = pytest.mark.parametrize("alignment", [0, 1, 6, 8, *long(*({*range(16)} - {0, 1, 6, 8}))])


@pytest.fixture(scope="module")
def kernels() -> Iterator[CudaKernels]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # the simulator's main thread polls, and would make the other threads wait for 5 ms
    yield CudaKernels(Simulated(threads=2))
    sys.setswitchinterval(interval)


def counts_of(dtype: DType) -> tuple[int, ...]:
    """Return counts for several vectors per thread, for one element, for none, and for an odd rest."""
    vector = 16 // dtype.itemsize
    return (9 * vector + 3, 1, 0, 2 * vector + 1)


def tensors(dtype: DType, alignment: int) -> list[Fenced]:
    return [at(alignment, numbers(dtype, n, i), dtype) for i, n in enumerate(counts_of(dtype))]


def joined(memories: list[Fenced]) -> Array:
    return np.concatenate([memory.array.astype(np.float64) for memory in memories])


def pack(kernels: CudaKernels, dtype: DType, wire: DType, alignments: tuple[int, int], scale: float = 1.0) -> None:
    sources = tensors(dtype, alignments[0])
    flat = Fenced(sum(counts_of(dtype)), wire, alignments[1])
    kernels.pack([s.address for s in sources], counts_of(dtype), dtype, flat.address, wire, scale)
    near(flat.array, rounded(joined(sources) * scale, wire), wire)
    assert flat.intact()


def unpack(kernels: CudaKernels, wire: DType, dtype: DType, alignments: tuple[int, int], scale: float = 1.0) -> None:
    counts = counts_of(dtype)
    flat = at(alignments[0], numbers(wire, sum(counts), 5), wire)
    targets = [Fenced(n, dtype, alignments[1]) for n in counts]
    kernels.unpack(flat.address, wire, [t.address for t in targets], counts, dtype, scale)
    near(joined(targets), rounded(flat.array.astype(np.float64) * scale, dtype), dtype)
    assert all(target.intact() for target in targets)


def others(alignment: int) -> tuple[int, int]:
    """Return two alignments for the other side: the same, and one that differs by 1, 2, 4, 8 or a mix."""
    return alignment, (alignment + (1, 2, 4, 8, 12, 6, 3, 7)[alignment % 8]) % 16


@every_dtype
@every_alignment
def test_pack(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    for other in others(alignment):
        pack(kernels, dtype, dtype, (alignment, other))


@every_dtype
@every_alignment
def test_unpack(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    for other in others(alignment):
        unpack(kernels, dtype, dtype, (other, alignment))


@every_dtype
@every_alignment
def test_scale(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    pack(kernels, dtype, dtype, (alignment, alignment), 0.4)
    unpack(kernels, dtype, dtype, (others(alignment)[1], alignment), 1.5)


@every_dtype
@every_alignment
def test_cast(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    pack(kernels, dtype, OTHER[dtype], (alignment, alignment * dtype.itemsize % 16))
    unpack(kernels, OTHER[dtype], dtype, (others(alignment)[1], alignment), 1.0 if not dtype.is_float else 0.25)


@every_dtype
@every_alignment
def test_reduce(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    op = OPS[alignment % 4]
    count = sum(counts_of(dtype))
    for other in others(alignment):
        sources = [at(a, numbers(dtype, count, i), dtype) for i, a in enumerate((alignment, other, alignment))]
        target = Fenced(count, dtype, alignment)
        kernels.reduce([s.address for s in sources], target.address, count, dtype, op)
        expected = rounded(combined([s.array for s in sources], dtype, op), dtype)
        (close if op in (Sum, Product) else near)(target.array, expected, dtype)
        assert target.intact()


def close(actual: Array, expected: Array, dtype: DType) -> None:
    """Assert that values are close.

    Sums and products of floats show the rounding of each step where values cancel each other.
    """
    step = {DType.F16: 2.0**-9, DType.BF16: 2.0**-6, DType.F32: 2.0**-20, DType.F64: 2.0**-49}.get(dtype, 0.0)
    np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=step, atol=8 * step)


@every_dtype
@every_alignment
def test_fill_identity(kernels: CudaKernels, dtype: DType, alignment: int) -> None:
    count = sum(counts_of(dtype))
    for op in OPS:
        target = Fenced(count, dtype, alignment)
        kernels.fill_identity(target.address, count, dtype, op)
        assert target.intact()
        values = numbers(dtype, count, 7)
        kept = rounded(combined([values, target.array], dtype, op), dtype)
        np.testing.assert_array_equal(kept.astype(np.float64), values.astype(np.float64))


@pytest.mark.parametrize("source", range(16))
def test_copies_between_any_two_alignments(kernels: CudaKernels, source: int) -> None:
    for target in range(16):
        pack(kernels, DType.I16, DType.I16, (source, target))


@pytest.mark.parametrize("wire", [DType.F32, DType.F16], ids=lambda dtype: dtype.label)
def test_tensors_of_several_chunks(kernels: CudaKernels, wire: DType) -> None:
    """A tensor that several blocks share is right, also after a tensor whose length leaves it unaligned."""
    counts = [5, 3 * LEAST_BYTES // 4 + 7, 2, LEAST_BYTES // 4]
    values = [numbers(DType.F32, n, n) for n in counts]
    flat = Fenced(sum(counts), wire, 0)
    kernels.pack([v.ctypes.data for v in values], counts, DType.F32, flat.address, wire)
    near(flat.array, np.concatenate(values), wire)
    back = [Fenced(n, DType.F32, 0) for n in counts]
    kernels.unpack(flat.address, wire, [b.address for b in back], counts, DType.F32)
    near(joined(back), flat.array, wire)
    assert flat.intact() and all(b.intact() for b in back)


def test_a_bucket_without_elements(kernels: CudaKernels) -> None:
    kernels.pack([0, 0], [0, 0], DType.F32, 0, DType.F32)
    kernels.unpack(0, DType.F16, [], [], DType.F32)
    kernels.reduce([0, 0], 0, 0, DType.F32, Sum)
    kernels.fill_identity(0, 0, DType.F32, Sum)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.label)
def test_every_sixteen_bit_pattern_survives(kernels: CudaKernels, dtype: DType) -> None:
    """Every 16-bit pattern survives the way through float32: finite values bit for bit, and a NaN stays a NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(native(dtype))
    wide, back = np.empty(bits.size, np.float32), np.empty(bits.size, np.uint16)
    kernels.pack([bits.ctypes.data], [bits.size], dtype, wide.ctypes.data, DType.F32)
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    kernels.pack([wide.ctypes.data], [bits.size], DType.F32, back.ctypes.data, dtype)
    numbers_only = ~np.isnan(wide)
    np.testing.assert_array_equal(back[numbers_only], bits[numbers_only])
    assert np.isnan(back.view(native(dtype)).astype(np.float32)[~numbers_only]).all()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.label)
def test_rounds_to_nearest_even(kernels: CudaKernels, dtype: DType) -> None:
    """Values halfway between two neighbours, and slightly above and below, are rounded to nearest even."""
    low = np.arange(0x100, 0x100 + 512, dtype=np.uint16).view(native(dtype)).astype(np.float32)
    high = np.arange(0x101, 0x101 + 512, dtype=np.uint16).view(native(dtype)).astype(np.float32)
    halfway = (low + high) / 2
    wide = np.concatenate([halfway, np.nextafter(halfway, high), np.nextafter(halfway, low)])
    wide = np.concatenate([wide, -wide])
    out = np.empty(wide.size, native(dtype))
    kernels.pack([wide.ctypes.data], [wide.size], DType.F32, out.ctypes.data, dtype)
    np.testing.assert_array_equal(out.view(np.uint16), wide.astype(native(dtype)).view(np.uint16))


def test_float64_to_float16_is_rounded_once(kernels: CudaKernels) -> None:
    """float64 is rounded to float16 once: rounding to float32 in between would give the wrong neighbour."""
    values = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11 - 2.0**-40, -(1 + 2.0**-11 + 2.0**-40)])
    out = np.empty(3, np.float16)
    kernels.pack([values.ctypes.data], [3], DType.F64, out.ctypes.data, DType.F16)
    np.testing.assert_array_equal(out, np.array([1 + 2.0**-10, 1, -(1 + 2.0**-10)], np.float16))


def test_whole_numbers_beyond_float64_stay(kernels: CudaKernels) -> None:
    values = np.array([2**62 + 1, -(2**62) - 1, 3])
    out = np.empty(3, np.int64)
    kernels.pack([values.ctypes.data], [3], DType.I64, out.ctypes.data, DType.I64)
    np.testing.assert_array_equal(out, values)
    kernels.reduce([values.ctypes.data], out.ctypes.data, 3, DType.I64, Sum)
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("op", [Min, Max], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.label)
def test_a_nan_is_the_result(kernels: CudaKernels, dtype: DType, op: ReduceOp) -> None:
    x = np.array([1, np.nan, 2, np.nan]).astype(native(dtype))
    y = np.array([np.nan, 1, 3, np.nan]).astype(native(dtype))
    out = np.empty(4, native(dtype))
    kernels.reduce([x.ctypes.data, y.ctypes.data], out.ctypes.data, 4, dtype, op)
    assert np.isnan(out.astype(np.float32)).tolist() == [True, True, False, True]


@pytest.mark.parametrize(("prescale", "scale"), [(1.0, 0.5), (0.25, 1.0), (0.75, 1.5), (3.0, 1 / 3)])
@every_dtype
def test_reduces_with_scales(kernels: CudaKernels, dtype: DType, prescale: float, scale: float) -> None:
    """Values are scaled before and after the reduction; integers are truncated after each scaling."""
    values = [numbers(dtype, 40, seed) for seed in range(3)]
    out = Fenced(40, dtype, 0)
    kernels.reduce([v.ctypes.data for v in values], out.address, 40, dtype, Sum, scale, prescale)
    scaled = [rounded(v.astype(np.float64) * prescale, dtype if not dtype.is_float else DType.F64) for v in values]
    total = combined(scaled, dtype, Sum)
    if dtype is DType.BOOL:
        total = (total != 0).astype(np.float64)
    expected = rounded(total * scale, dtype)
    close(out.array, expected, dtype)


def test_the_target_may_be_a_source(kernels: CudaKernels) -> None:
    values = [numbers(DType.F32, 100, seed) for seed in range(3)]
    expected = combined(values, DType.F32, Sum)
    kernels.reduce([v.ctypes.data for v in values], values[1].ctypes.data, 100, DType.F32, Sum)
    close(values[1], expected, DType.F32)


def test_offsets_follow_the_counts() -> None:
    from ddl_nccl.cuda.chunks import table

    counts = [10, 0, 25, 3]
    rows = [tuple(table(counts, 10)[i : i + 4]) for i in range(0, 4 * 5, 4)]
    begins = [0, *accumulate(counts)]
    assert rows == [(0, 0, 10, 0), (2, 0, 10, begins[2]), (2, 10, 10, 20), (2, 20, 5, 30), (3, 0, 3, begins[3])]
