"""Exact sums of integers, for numba: elements made so wide that no sum of them overflows, and means of such sums.

Imported only while compiling. Arguments are int64 (addresses, counts, codes) or float64 (scales).
"""

from __future__ import annotations

from ddlcore.kernels.bucket import BLOCK, BLOCK_BYTES, I64, ITEMSIZE
from ddlcore.kernels.code import FUNCTIONS
from ddlcore.kernels.intrinsics import compiled, copy, outside, read, stack, write

__all__ = ["ddl_mean", "ddl_widen"]

_cast = outside("ddl_cast")

LOW = 0xFFFFFFFF
LOW_SIZE = 4294967296.0  # 2^32
LARGEST, SMALLEST = 0x7FFFFFFFFFFFFFFF, -0x8000000000000000
END = 9223372036854775808.0  # 2^63, the first float64 that an int64 does not hold


@compiled("d")
def _truncated(value: float) -> int:
    """Towards zero; what an int64 does not hold becomes the nearest that it does, and a NaN 0."""
    if value != value:
        return 0
    if value >= END:
        return LARGEST
    if value < -END:
        return SMALLEST
    return int(value)


@compiled("qqq")
def _quotient(high: int, low: int, divisor: int) -> int:
    """(high * 2^32 + low) / divisor towards zero, by long division: 0 <= low < 2^32, 0 < divisor < 2^31.

    Wraps around where that is no int64, which it always is for the mean of as many int64 as the divisor.
    """
    upper = high // divisor  # floored, so that what is left is not negative
    rest = ((high - upper * divisor) << 32) + low
    lower = rest // divisor
    quotient = (upper << 32) + lower
    if high < 0 and rest != lower * divisor:
        quotient += 1  # the floor of a negative number that is not whole
    return quotient


@compiled(FUNCTIONS["ddl_widen"])
def ddl_widen(source: int, target: int, count: int, dtype: int, scale: float) -> int:
    """Writes each element, times ``scale``, as numbers that can be added: one int64; of int64 two, high and low half.

    2^31 of the halves can be added, and so can 2^31 elements of 32 bits or fewer.
    """
    block = stack(BLOCK_BYTES)
    at = 0
    while at < count:
        n = min(BLOCK, count - at)
        if dtype == I64:
            copy(block, source + 8 * at, 8 * n)
        else:
            _cast(source + at * ITEMSIZE[dtype], dtype, block, I64, n, 1.0)
        if scale != 1.0:
            for i in range(n):
                write(block + 8 * i, _truncated(float(read(block + 8 * i)) * scale))
        if dtype == I64:
            for i in range(n):
                value, to = read(block + 8 * i), target + 16 * (at + i)
                write(to, value >> 32)
                write(to + 8, value & LOW)
        else:
            copy(target + 8 * at, block, 8 * n)
        at += n
    return 0


@compiled(FUNCTIONS["ddl_mean"])
def ddl_mean(source: int, target: int, count: int, dtype: int, divisor: int, scale: float) -> int:
    """Turn exact sums back into the type: multiply each by ``scale``, divide by ``divisor``, truncate towards zero.

    Exact where ``scale`` is 1, else computed in float64. What the type does not hold wraps around.
    """
    block = stack(BLOCK_BYTES)
    at = 0
    while at < count:
        n = min(BLOCK, count - at)
        for i in range(n):
            if dtype == I64:
                place = source + 16 * (at + i)
                low = read(place + 8)
                high = read(place) + (low >> 32)
                low = low & LOW
            else:
                total = read(source + 8 * (at + i))
                high = total >> 32
                low = total & LOW
            if scale == 1.0:
                value = _quotient(high, low, divisor)
            else:
                value = _truncated((float(high) * LOW_SIZE + float(low)) * scale / float(divisor))
            write(block + 8 * i, value)
        if dtype == I64:
            copy(target + 8 * at, block, 8 * n)
        else:
            _cast(block, I64, target + at * ITEMSIZE[dtype], dtype, n, 1.0)
        at += n
    return 0
