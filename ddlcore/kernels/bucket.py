"""The bucket kernels for numba: convert, pack, unpack, reduce and digest memory, without any knowledge of ranks.

This module is imported only while compiling. Arguments are int64 (addresses, counts, codes) or float64 (scales).
"""

from __future__ import annotations

from ddlcore.kernels.functions import FUNCTIONS
from ddlcore.kernels.intrinsics import compiled, copy, outside, read, stack, write
from ddlcore.kernels.loops import WIDE_LEFT, WIDE_OUT
from ddlcore.types import DType

_cast, _combine = outside("ddl_cast"), outside("ddl_combine")

BLOCK = 2048  # elements; two blocks of 8 bytes each fit the first-level cache
BLOCK_BYTES = 8 * BLOCK
ITEMSIZE = tuple(dtype.itemsize for dtype in DType)
F16, BF16, F32, F64, I64 = (int(d) for d in (DType.F16, DType.BF16, DType.F32, DType.F64, DType.I64))


@compiled("q")
def _is_float(dtype: int) -> int:
    return F16 <= dtype <= F64


@compiled("qqd")
def _hub(s: int, t: int, scale: float) -> int:
    """Return the type through which elements of type ``s`` are converted to type ``t``, for a factor of ``scale``."""
    if F16 <= s <= F32 and F16 <= t <= F32:
        return F32
    if _is_float(s) or _is_float(t) or scale != 1.0:
        return F64
    return I64


@compiled("qqqqqd", "")
def _convert_elements(source: int, s: int, target: int, t: int, count: int, scale: float) -> None:
    """Convert ``count`` elements of type ``s`` to type ``t``, times ``scale``.

    ``source`` and ``target`` are the same memory (only if both types have the same size), or they do not overlap.
    """
    if s == t and scale == 1.0:
        if source != target:
            copy(target, source, count * ITEMSIZE[s])
        return
    hub = _hub(s, t, scale)
    if hub in (s, t):
        _cast(source, s, target, t, count, scale)
        return
    block = stack(BLOCK_BYTES)
    at = 0
    while at < count:
        n = min(BLOCK, count - at)
        _cast(source + at * ITEMSIZE[s], s, block, hub, n, scale)
        _cast(block, hub, target + at * ITEMSIZE[t], t, n, 1.0)
        at += n


@compiled("qqqqqqqdd", "")
def _reduce_block(
    sources: int, n: int, offset: int, out: int, count: int, dtype: int, op: int, prescale: float, scale: float
) -> None:
    """Reduce one block of ``count`` elements of ``n`` sources into ``out``; ``n`` is at least 2.

    In each source, the block begins ``offset`` bytes after the address in the table ``sources``.
    """
    sum_block = stack(BLOCK_BYTES)
    scaled_block = stack(BLOCK_BYTES)
    floating = _is_float(dtype)
    wide = dtype in (F16, BF16)
    left = read(sources) + offset
    if not floating and prescale != 1.0:
        _convert_elements(left, dtype, sum_block, dtype, count, prescale)
        left = sum_block
    for k in range(1, n):
        right = read(sources + 8 * k) + offset
        if not floating and prescale != 1.0:
            _convert_elements(right, dtype, scaled_block, dtype, count, prescale)
            right = scaled_block
        last = k == n - 1
        form = 0
        if wide:
            form = (0 if k == 1 else WIDE_LEFT) | (0 if last else WIDE_OUT)
        # Only the last step writes to the target, which may be one of the sources.
        to = out if last else sum_block
        _combine(dtype, op, form, left, right, to, count, prescale if k == 1 else 1.0, prescale, scale if last else 1.0)
        left = to
    if not floating and scale != 1.0:
        _convert_elements(out, dtype, out, dtype, count, scale)


@compiled("qqqqdd", "")
def _scale_one(source: int, target: int, count: int, dtype: int, prescale: float, scale: float) -> None:
    """Compute target = scale * (prescale * source), rounded once."""
    if prescale == 1.0 or scale == 1.0:
        _convert_elements(source, dtype, target, dtype, count, prescale * scale)
        return
    wide = F32 if dtype in (F16, BF16) else dtype
    block = stack(BLOCK_BYTES)
    at = 0
    while at < count:
        n = min(BLOCK, count - at)
        _convert_elements(source + at * ITEMSIZE[dtype], dtype, block, wide, n, prescale)
        _convert_elements(block, wide, target + at * ITEMSIZE[dtype], dtype, n, scale)
        at += n


@compiled(FUNCTIONS["ddl_reduce"])
def ddl_reduce(
    sources: int, n: int, target: int, count: int, dtype: int, op: int, prescale: float, scale: float
) -> int:
    """Compute target = scale * (prescale * s0 op prescale * s1 op …), in this order.

    The addresses of s0, s1, … are the ``n`` words of the table ``sources``.
    """
    if n == 1:
        _scale_one(read(sources), target, count, dtype, prescale, scale)
        return 0
    block = BLOCK
    if n == 2 and (prescale == 1.0 or _is_float(dtype)):
        block = count  # one block: nothing is kept between two steps
    size = ITEMSIZE[dtype]
    at = 0
    while at < count:
        k = min(block, count - at)
        _reduce_block(sources, n, at * size, target + at * size, k, dtype, op, prescale, scale)
        at += k
    return 0


@compiled(FUNCTIONS["ddl_convert"])
def ddl_convert(
    addresses: int, counts: int, n: int, dtype: int, flat: int, wire: int, scale: float, unpack: int
) -> int:
    """Convert ``n`` tensors of ``dtype`` to one sequence of ``wire`` elements at ``flat``.

    With ``unpack``, convert the sequence to the tensors. The tensors are at ``addresses[i]`` and have ``counts[i]``
    elements.
    """
    at = flat
    for i in range(n):
        address, count = read(addresses + 8 * i), read(counts + 8 * i)
        if unpack:
            _convert_elements(at, wire, address, dtype, count, scale)
        else:
            _convert_elements(address, dtype, at, wire, count, scale)
        at += count * ITEMSIZE[wire]
    return 0


PRIME = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number; odd, so that multiplying by it is reversible
LOW_35 = (1 << 35) - 1


@compiled("qq")
def _mixed(state: int, word: int) -> int:
    """Return ``state`` after mixing ``word`` into it: from the same state, different words lead to different states.

    By the shift, the high bits affect the low ones, too; without it, changes of the top bit in two words would cancel
    each other. Without the mask, the shift would copy the sign bit and lose information.
    """
    product = (state ^ word) * PRIME
    return product ^ ((product >> 29) & LOW_35)


@compiled(FUNCTIONS["ddl_digest"])
def ddl_digest(addresses: int, sizes: int, n: int, out: int) -> int:
    """Write a 64-bit digest for each of n memory ranges: out[i] is for the ``sizes[i]`` bytes at ``addresses[i]``.

    Four words at a time are mixed, each into a state of its own. Within one state, each multiplication has to wait for
    the one before.
    """
    for i in range(n):
        at, size = read(addresses + 8 * i), read(sizes + 8 * i)
        a, b, c, d = size, size + 1, size + 2, size + 3
        end = at + size - size % 32
        while at < end:
            a = _mixed(a, read(at))
            b = _mixed(b, read(at + 8))
            c = _mixed(c, read(at + 16))
            d = _mixed(d, read(at + 24))
            at += 32
        left = size % 32
        while left >= 8:
            a = _mixed(a, read(at))
            at += 8
            left -= 8
        if left:
            tail = stack(8)
            write(tail, 0)
            copy(tail, at, left)
            a = _mixed(a, read(tail))
        # The states are mixed one after the other; a plain sum or xor would cancel the same change in two of them.
        write(out + 8 * i, _mixed(_mixed(_mixed(_mixed(size, a), b), c), d))
    return 0
