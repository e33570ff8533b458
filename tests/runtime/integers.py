"""What every transport is asked about integers: averages at the ends of each type, against Python's own integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import ddlcore as ddl

__all__ = ["TYPES", "average", "check_averages", "values"]

TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
ROWS = 11  # no multiple of the ranks


def values(rank: int, dtype: Any, rows: int = ROWS) -> Any:
    """Rank ``rank``'s rows, (rows, 3): both ends of the type, their neighbours, both signs, and chance."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng((rank, info.bits))
    array = rng.integers(info.min, info.max, (rows, 3), dtype, endpoint=True)
    array[0] = info.max
    array[1] = info.min
    array[2] = (info.max, info.max - rank, info.min + rank)
    array[3] = (info.min if rank == 0 else 0, info.max if rank == 0 else 1, info.max // 2 + rank)
    array[4] = (info.min if rank % 2 else info.max, info.min + (rank == 0), 1 if rank == 0 else 0)
    return array


def truncated(numerator: int, denominator: int) -> int:
    """Their quotient, toward zero."""
    return abs(numerator) // denominator * (1 if numerator >= 0 else -1)


def average(arrays: Sequence[Any]) -> Any:
    """The mean, exact and truncated toward zero."""
    flat = zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
    means = [truncated(sum(each), len(arrays)) for each in flat]
    return np.array(means, arrays[0].dtype).reshape(arrays[0].shape)


def check_averages(rank: int, size: int, steps: int) -> None:
    """Have every verb that averages do so, ``steps`` times with the same names, on each of ``size`` ranks."""
    given = {dtype: values(rank, dtype) for dtype in TYPES}
    expected = {dtype: average([values(r, dtype) for r in range(size)]) for dtype in TYPES}
    rows = [ROWS // size + (r < ROWS % size) for r in range(size)]
    begin = sum(rows[:rank])
    for _ in range(steps):
        for dtype in TYPES:
            label, array, mean = np.dtype(dtype).name, given[dtype], expected[dtype]
            part = mean[begin : begin + rows[rank]]
            _same(ddl.allreduce(array, name=f"a.{label}"), mean)
            written = array.copy()
            _same(ddl.allreduce_(written, name=f"w.{label}"), mean)
            _same(ddl.reducescatter(array, name=f"r.{label}"), part)
            both = ddl.grouped_allreduce([array, array[:2]], name=f"g.{label}")
            _same(both[0], mean)
            _same(both[1], mean[:2])
            handle = ddl.allreduce_async(array)
            _same(handle.wait(), mean)
            _same(array, values(rank, dtype))  # only read


def _same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
