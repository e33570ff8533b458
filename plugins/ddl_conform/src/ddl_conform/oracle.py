"""Computes the right results of every collective with numpy. This module uses no code of the transports under test."""

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
    """Return the numpy dtype for ``dtype``. The dtype for bfloat16 is that of the package ml_dtypes."""
    if dtype is DType.BF16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype.label)


def values(dtype: DType, count: int, rank: int, *, seed: int = 0) -> Array:
    """Return an array of ``count`` random values of the type ``dtype``.

    The same arguments always give the same values; another ``rank`` or ``seed`` gives other values. Integers are so
    small that sums and products of the values of four ranks fit into the type.
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
    """Return postscale * (s0*prescale op s1*prescale op …), where s0, s1 and so on are the arrays ``sources``.

    ``sources`` are in the order of the ranks, and are combined in this order. 16-bit floats are computed in float32 and
    rounded once. Integers are scaled in float64, and the products are truncated. If a transport reduces within each
    host first, ``hosts`` must be the host of each rank. In this case, the result of each host is rounded, and then the
    results of the hosts are combined in the order of their first ranks.
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
    """Return the result of an allgather: the arrays ``sources`` of all ranks, concatenated."""
    return np.concatenate(list(sources))


def reducescatterv(
    sources: Sequence[Array], counts: Sequence[int], op: ReduceOp, rank: int, hosts: Sequence[int] | None = None
) -> Array:
    """Return the result of a reducescatter on ``rank``: the part of the reduced array that belongs to this rank.

    Rank r gets ``counts[r]`` elements. ``hosts`` has the same meaning as in ``reduce``.
    """
    begin = sum(counts[:rank])
    return reduce(sources, op, hosts=hosts)[begin : begin + counts[rank]]


def alltoallv(sources: Sequence[Array], counts: Sequence[Sequence[int]], rank: int) -> Array:
    """Return the result of an alltoall on ``rank``: the elements sent to it by all ranks, in the order of the senders.

    Rank s sends ``counts[s][d]`` elements of ``sources[s]`` to rank d.
    """
    parts = []
    for source, row in zip(sources, counts):
        begin = sum(row[:rank])
        parts.append(source[begin : begin + row[rank]])
    return np.concatenate(parts)


def difference(actual: Array, expected: Array, *, terms: int = 1, exact: bool = True) -> str:
    """Return a text that describes the first difference between two arrays; "" if the arrays agree.

    If ``exact`` is true, every bit must agree. If ``exact`` is false, floats may differ by rounding errors. ``terms`` is
    the number of additions whose rounding errors are allowed; values are added in float32 or in a wider type. One more
    rounding error is allowed, that of the arrays' own type.
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
    """Return the element of each array at the index ``at``, as two texts.

    If both texts are the same, the bytes of the elements are added in hexadecimal. This can happen because every byte
    of a bool array except 0 is printed as True, and because all NaNs are printed in the same way.
    """
    shown = [str(array[at]) for array in (actual, expected)]
    if shown[0] == shown[1]:
        raw = np.dtype(f"u{actual.dtype.itemsize}")
        found = [np.ascontiguousarray(array).view(raw)[at].tobytes() for array in (actual, expected)]
        shown = [f"{text} (bytes {content.hex(' ')})" for text, content in zip(shown, found)]
    return shown
