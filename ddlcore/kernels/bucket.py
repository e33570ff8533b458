"""Kernels for the memory of one bucket: convert, pack, unpack, reduce, compute digests. They know nothing about ranks.

This module is imported only when numba compiles the kernels. The arguments of all functions are int64 (addresses,
counts, numbers of types and operations) or float64 (scales).
"""

from __future__ import annotations

from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import compiled, copy, outside, read, stack, write
from ddlcore.kernels.loops import WIDE_LEFT, WIDE_OUT
from ddlcore.types import DType

_cast, _combine = outside(CPU, "ddl_cast"), outside(CPU, "ddl_combine")

BLOCK = 2048  # elements; two blocks of 8 bytes each fit the first-level cache
BLOCK_BYTES = 8 * BLOCK
ITEMSIZE = tuple(dtype.itemsize for dtype in DType)
F16, BF16, F32, F64, I64 = (int(d) for d in (DType.F16, DType.BF16, DType.F32, DType.F64, DType.I64))


@compiled("q")
def _is_float(dtype: int) -> int:
    return F16 <= dtype <= F64


@compiled("qqd")
def _hub(s: int, t: int, scale: float) -> int:
    """Return the intermediate type for the conversion from type ``s`` to type ``t`` with the factor ``scale``.

    Elements are first converted to this type, then multiplied by ``scale``, then converted to ``t``.
    """
    if F16 <= s <= F32 and F16 <= t <= F32:
        return F32
    if _is_float(s) or _is_float(t) or scale != 1.0:
        return F64
    return I64


@compiled("qqqqqd", "")
def _convert_elements(source: int, s: int, target: int, t: int, count: int, scale: float) -> None:
    """Multiply ``count`` elements by ``scale``, and convert them from type ``s`` to type ``t``.

    ``source`` and ``target`` are the addresses of the elements. Either the two memory ranges do not overlap, or the
    addresses are equal. Equal addresses require that both types have the same size.
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
    """Reduce one block of ``count`` elements of ``n`` sources, and write the result to ``out``. ``n`` is at least 2.

    ``sources`` is the address of a table with the address of each source. In each source, the block begins ``offset``
    bytes after that address. The elements are multiplied by ``prescale``, and the result is multiplied by ``scale``.
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
    """Compute target = scale * (prescale * source), without rounding 16-bit floats in between."""
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


@compiled(CPU.functions["ddl_reduce"])
def ddl_reduce(
    sources: int, n: int, target: int, count: int, dtype: int, op: int, prescale: float, scale: float
) -> int:
    """Compute target = scale * (prescale * s0 op prescale * s1 op …), in this order. Return 0.

    ``sources`` is the address of a table of ``n`` words: the addresses of the sources s0, s1, …
    """
    if n == 1:
        _scale_one(read(sources), target, count, dtype, prescale, scale)
        return 0
    block = BLOCK
    if n == 2 and (prescale == 1.0 or _is_float(dtype)):
        block = count  # one block: there is no intermediate result that must fit into the cache
    size = ITEMSIZE[dtype]
    at = 0
    while at < count:
        k = min(block, count - at)
        _reduce_block(sources, n, at * size, target + at * size, k, dtype, op, prescale, scale)
        at += k
    return 0


@compiled(CPU.functions["ddl_convert"])
def ddl_convert(
    addresses: int, counts: int, n: int, dtype: int, flat: int, wire: int, scale: float, unpack: int
) -> int:
    """Convert ``n`` tensors of type ``dtype`` to one contiguous array of type ``wire`` at the address ``flat``.

    If ``unpack`` is not 0, convert in the other direction, from the array to the tensors. Tensor i is at
    ``addresses[i]`` and has ``counts[i]`` elements. The elements are multiplied by ``scale``. Return 0.
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


PRIME = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number; it is odd, so the multiplication is reversible
LOW_35 = (1 << 35) - 1


@compiled("qq")
def _mixed(state: int, word: int) -> int:
    """Mix ``word`` into ``state``, and return the new state.

    For the same old state, different words give different new states.

    The shift lets the high bits affect the low bits. Without the shift, changes of the highest bit in two words would
    cancel each other. Without the mask, the shift would copy the sign bit and lose information.
    """
    product = (state ^ word) * PRIME
    return product ^ ((product >> 29) & LOW_35)


@compiled(CPU.functions["ddl_digest"])
def ddl_digest(addresses: int, sizes: int, n: int, out: int) -> int:
    """Compute a 64-bit digest of each of ``n`` memory ranges. Return 0.

    Range i has ``sizes[i]`` bytes at ``addresses[i]``, and its digest is written to ``out[i]``. Four words are mixed at
    the same time, each into a separate state, because two multiplications for one state cannot run in parallel.
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
        # The four states are mixed one after the other. In a plain sum or xor, equal changes in two states could cancel
        # each other.
        write(out + 8 * i, _mixed(_mixed(_mixed(_mixed(size, a), b), c), d))
    return 0
