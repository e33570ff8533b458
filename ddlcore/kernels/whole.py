"""Kernels for exact means of integers: widen elements so that sums cannot overflow, and convert sums to means.

This module is imported only when numba compiles the kernels. The arguments of all functions are int64 (addresses,
counts, numbers of types) or float64 (scales).
"""

from __future__ import annotations

from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import compiled, copy, outside, read, stack, write
from ddlcore.kernels.bucket import BLOCK, BLOCK_BYTES, I64, ITEMSIZE

_cast = outside(CPU, "ddl_cast")

LOW = 0xFFFFFFFF
LOW_SIZE = 4294967296.0  # 2^32
LARGEST, SMALLEST = 0x7FFFFFFFFFFFFFFF, -0x8000000000000000
END = 9223372036854775808.0  # 2^63, the first float64 that is too large for an int64


@compiled("d")
def _truncated(value: float) -> int:
    """Return ``value`` truncated toward zero.

    A value that does not fit an int64 becomes the nearest int64, and a NaN becomes 0.
    """
    if value != value:
        return 0
    if value >= END:
        return LARGEST
    if value < -END:
        return SMALLEST
    return int(value)


@compiled("qqq")
def _quotient(high: int, low: int, divisor: int) -> int:
    """Return (high * 2^32 + low) / divisor, truncated toward zero and computed without floats.

    Requires 0 <= low < 2^32 and 0 < divisor < 2^31. The result wraps around if it does not fit an int64. The mean of
    ``divisor`` int64 values always fits.
    """
    upper = high // divisor  # floored, so that the rest is not negative
    rest = ((high - upper * divisor) << 32) + low
    lower = rest // divisor
    quotient = (upper << 32) + lower
    if high < 0 and rest != lower * divisor:
        quotient += 1  # the floor of a negative fraction is one below the truncated value
    return quotient


@compiled(CPU.functions["ddl_widen"])
def ddl_widen(source: int, target: int, count: int, dtype: int, scale: float) -> int:
    """Multiply each element by ``scale``, and write it to ``target`` as one or two int64 numbers. Return 0.

    An element of at most 32 bits becomes one number. An int64 becomes two numbers: its high half and its low half. Up
    to 2^31 such numbers can be added without overflow.
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


@compiled(CPU.functions["ddl_mean"])
def ddl_mean(source: int, target: int, count: int, dtype: int, divisor: int, scale: float) -> int:
    """Convert sums to means of type ``dtype``. Return 0.

    ``source`` contains sums of the numbers that ``ddl_widen`` writes. Each sum is multiplied by ``scale``, divided by
    ``divisor`` and truncated toward zero. If ``scale`` is 1, the result is exact; otherwise it is computed in float64.
    A result that does not fit the type wraps around.
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
