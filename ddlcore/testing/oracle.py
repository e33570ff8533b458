"""Computes the results that every collective must give, with numpy alone. It knows nothing of what is tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlcore.types import DType, ReduceOp

__all__ = [
    "allgatherv",
    "alltoallv",
    "difference",
    "numpy_dtype",
    "reduce",
    "reducescatterv",
    "values",
]

Array = Any  # np.ndarray; its element type is known only at run time

_FOLDS: dict[ReduceOp, Any] = {
    ReduceOp.Sum: np.add,
    ReduceOp.Min: np.minimum,
    ReduceOp.Max: np.maximum,
    ReduceOp.Product: np.multiply,
}
_SIGNIFICANT_BITS = {DType.F16: 11, DType.BF16: 8, DType.F32: 24, DType.F64: 53}


def numpy_dtype(dtype: DType) -> Any:
    """Return the numpy type of ``dtype``; the type of bfloat16 comes from ml_dtypes."""
    if dtype is DType.BF16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype.label)


def values(dtype: DType, count: int, rank: int, *, seed: int = 0) -> Array:
    """Return ``count`` random values of the type.

    The same arguments give the same values; other ranks get other values. Integers are so small that sums and products
    of four ranks fit into their type.
    """
    random = np.random.default_rng([seed, rank, count])
    if dtype is DType.BOOL:
        return random.integers(0, 2, count).astype(bool)
    if dtype.is_float:
        return random.normal(size=count).astype(numpy_dtype(dtype))
    low = 0 if dtype in (DType.U8, DType.U16) else -3
    return random.integers(low, 4, count).astype(numpy_dtype(dtype))


def reduce(
    sources: Sequence[Array],
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    hosts: Sequence[int] | None = None,
) -> Array:
    """Return postscale * (s0*prescale op s1*prescale op …), in the order of the ranks.

    16-bit floats are computed in float32 and rounded once. Integers are scaled in float64 and truncated, before and
    after the reduction. ``hosts`` is the host of each rank, for a transport that reduces within each host first. Then
    the result of each host is rounded, and the hosts' results are reduced in the order of their first ranks.
    """
    if hosts is not None:
        on_each = [[s for s, h in zip(sources, hosts) if h == host] for host in dict.fromkeys(hosts)]
        return reduce([reduce(each, op, prescale) for each in on_each], op, postscale=postscale)
    dtype = sources[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and DType.of(dtype.name).is_float else dtype
    parts = [_scaled(source.astype(wide), prescale) for source in sources]
    total = parts[0]
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = _FOLDS[op](total, part, dtype=None if wide == np.dtype(bool) else wide)
    return _scaled(total, postscale).astype(dtype)


def _scaled(array: Array, scale: float) -> Array:
    if scale == 1.0:
        return array
    if DType.of(array.dtype.name).is_float:
        return array * array.dtype.type(scale)
    return (array.astype(np.float64) * scale).astype(array.dtype)


def allgatherv(sources: Sequence[Array]) -> Array:
    """Return the sources of all ranks, one after the other."""
    return np.concatenate(list(sources))


def reducescatterv(
    sources: Sequence[Array], counts: Sequence[int], op: ReduceOp, rank: int, hosts: Sequence[int] | None = None
) -> Array:
    """Return the part of the reduction that ``rank`` gets; rank r gets ``counts[r]`` elements."""
    begin = sum(counts[:rank])
    return reduce(sources, op, hosts=hosts)[begin : begin + counts[rank]]


def alltoallv(sources: Sequence[Array], counts: Sequence[Sequence[int]], rank: int) -> Array:
    """Return what all ranks sent to ``rank``, ordered by sender; rank s sends ``counts[s][d]`` elements to rank d."""
    parts = []
    for source, row in zip(sources, counts):
        begin = sum(row[:rank])
        parts.append(source[begin : begin + row[rank]])
    return np.concatenate(parts)


def difference(actual: Array, expected: Array, *, terms: int = 1, exact: bool = True) -> str:
    """Return where two arrays first differ, in words. The result is empty if they agree.

    With ``exact``, they must agree bit by bit. Otherwise floats may differ as much as if ``terms`` numbers of the
    expected size had been added in another order: by ``terms`` roundings of the type in which they are added, and one
    rounding of their own type.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    dtype = DType.of(expected.dtype.name)
    if exact or not dtype.is_float:
        raw = np.dtype(f"u{dtype.itemsize}")
        wrong = np.ascontiguousarray(actual).view(raw) != np.ascontiguousarray(expected).view(raw)
    else:
        a, e = actual.astype(np.float64), expected.astype(np.float64)
        added_in = max(_SIGNIFICANT_BITS[dtype], 24)
        allowed = terms * 2.0 ** (3 - added_in) + (
            2.0 ** (1 - _SIGNIFICANT_BITS[dtype]) if dtype.itemsize == 2 else 0.0
        )
        wrong = ~np.isclose(a, e, rtol=allowed, atol=allowed, equal_nan=True)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = at[0] if len(at) == 1 else at
    first = " instead of ".join(_told_apart(actual, expected, at))
    return f"{int(wrong.sum())} of {wrong.size} elements differ, first [{where}]: {first}"


def _told_apart(actual: Array, expected: Array, at: tuple[int, ...]) -> list[str]:
    """Return the element ``at`` this place of both arrays as text, with its bytes in hexadecimal if both print alike.

    Every byte except 0 prints as True, and all NaNs print alike.
    """
    shown = [str(array[at]) for array in (actual, expected)]
    if shown[0] == shown[1]:
        raw = np.dtype(f"u{actual.dtype.itemsize}")
        found = [np.ascontiguousarray(array).view(raw)[at].tobytes() for array in (actual, expected)]
        shown = [f"{text} (bytes {content.hex(' ')})" for text, content in zip(shown, found)]
    return shown
