"""Emits LLVM code that converts vectors of elements: how each type is widened, rounded and stored.

The same code runs on the device and, for tests, on the host's processor. Only operations of NVVM's old dialect of LLVM
are used. This module is imported only for compiling.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ddlcore.types import DType, ReduceOp

__all__ = [
    "F32",
    "F64",
    "I8",
    "I32",
    "I64",
    "STORED",
    "Value",
    "apply",
    "convert",
    "rescale",
    "splat",
    "vector",
    "widen",
]

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
STORED = {
    DType.U8: I8, DType.I8: I8, DType.U16: I16, DType.I16: I16, DType.I32: I32, DType.I64: I64,
    DType.F16: I16, DType.BF16: I16, DType.F32: F32, DType.F64: F64, DType.BOOL: I8,
}  # fmt: skip
UNSIGNED = (DType.U8, DType.U16)
SHORT_FLOATS = (DType.F16, DType.BF16)
THROUGH_FLOAT = (*SHORT_FLOATS, DType.F32)

Value = Any  # an llvmlite value; llvmlite has no type annotations


def vector(element: Any, n: int) -> Any:
    """Return a vector type of n elements."""
    return ir.VectorType(element, n)


def _like(x: Value, element: Any) -> Any:
    return vector(element, x.type.count)


def _constant(x: Value, element: Any, value: float) -> Value:
    """Return a vector that repeats ``value`` as many times as ``x`` has elements."""
    return ir.Constant(_like(x, element), [value] * x.type.count)


def splat(b: Any, scalar: Value, n: int) -> Value:
    """Return a vector that repeats ``scalar`` n times."""
    empty = ir.Constant(vector(scalar.type, n), ir.Undefined)
    first = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, ir.Constant(vector(I32, n), [0] * n))


# --- one step up or down


def _to_float(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored elements of a 16-bit float type, or float32, to float32."""
    if dtype is DType.F32:
        return x
    if dtype is DType.F16:
        return b.fpext(b.bitcast(x, _like(x, HALF)), _like(x, F32))
    return b.bitcast(b.shl(b.zext(x, _like(x, I32)), _constant(x, I32, 16)), _like(x, F32))


def _from_float(b: Any, x: Value, dtype: DType) -> Value:
    """Convert float32 to a 16-bit float type, rounded to nearest even, or leave it as float32."""
    if dtype is DType.F32:
        return x
    if dtype is DType.F16:
        return b.bitcast(b.fptrunc(x, _like(x, HALF)), _like(x, I16))
    bits = b.bitcast(x, _like(x, I32))
    odd = b.and_(b.lshr(bits, _constant(x, I32, 16)), _constant(x, I32, 1))
    rounded = b.add(bits, b.add(odd, _constant(x, I32, 0x7FFF)))
    quiet = b.or_(bits, _constant(x, I32, 0x400000))  # a NaN with only low mantissa bits set would round to infinity
    kept = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(kept, _constant(x, I32, 16)), _like(x, I16))


def _double_to_float_odd(b: Any, x: Value) -> Value:
    """Convert to float32, rounded to odd, so that the later rounding to 16 bits gives what a single one would give."""
    near = b.fptrunc(x, _like(x, F32))
    back = b.fpext(near, _like(x, F64))
    bits = b.bitcast(near, _like(x, I32))
    even = b.icmp_unsigned("==", b.and_(bits, _constant(x, I32, 1)), _constant(x, I32, 0))
    inexact = b.and_(b.fcmp_ordered("!=", back, x), even)
    mask = _constant(x, I64, 0x7FFFFFFFFFFFFFFF)
    magnitudes = [b.and_(b.bitcast(y, _like(x, I64)), mask) for y in (back, x)]
    above = b.icmp_unsigned(">", *magnitudes)
    odd = b.add(bits, b.select(above, _constant(x, I32, -1), _constant(x, I32, 1)))
    return b.bitcast(b.select(inexact, odd, bits), _like(x, F32))


def _to_double(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored elements of any type to float64."""
    if dtype is DType.F64:
        return x
    if dtype.is_float:
        return b.fpext(_to_float(b, x, dtype), _like(x, F64))
    return b.sitofp(_to_long(b, x, dtype), _like(x, F64))


def _from_double(b: Any, x: Value, dtype: DType) -> Value:
    """Convert float64 to any type: floats are rounded once, integers truncated, and a bool is true if not 0."""
    if dtype is DType.F64:
        return x
    if dtype is DType.F32:
        return b.fptrunc(x, _like(x, F32))
    if dtype.is_float:
        return _from_float(b, _double_to_float_odd(b, x), dtype)
    if dtype is DType.BOOL:
        return b.zext(b.fcmp_unordered("!=", x, _constant(x, F64, 0.0)), _like(x, I8))
    return _from_long(b, _truncated(b, x), dtype)


def _truncated(b: Any, x: Value) -> Value:
    """Convert float64 to int64, rounded towards zero. Out of range values become the nearest limit, a NaN becomes 0."""
    least, most = _constant(x, F64, -(2.0**63)), _constant(x, F64, 2.0**63)
    fits = b.and_(b.fcmp_ordered(">=", x, least), b.fcmp_ordered("<", x, most))
    whole = b.fptosi(b.select(fits, x, _constant(x, F64, 0.0)), _like(x, I64))
    whole = b.select(b.fcmp_ordered(">=", x, most), _constant(x, I64, 2**63 - 1), whole)
    return b.select(b.fcmp_ordered("<", x, least), _constant(x, I64, -(2**63)), whole)


def _to_long(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored integers or bools to int64."""
    if dtype is DType.BOOL:
        return b.zext(b.icmp_unsigned("!=", x, _constant(x, I8, 0)), _like(x, I64))
    if dtype is DType.I64:
        return x
    return (b.zext if dtype in UNSIGNED else b.sext)(x, _like(x, I64))


def _from_long(b: Any, x: Value, dtype: DType) -> Value:
    """Convert int64 to another integer type or bool; values that do not fit wrap around."""
    if dtype is DType.BOOL:
        return b.zext(b.icmp_unsigned("!=", x, _constant(x, I64, 0)), _like(x, I8))
    return x if dtype is DType.I64 else b.trunc(x, _like(x, STORED[dtype]))


# --- what the kernels ask for


def convert(b: Any, x: Value, source: DType, target: DType, scale: Value) -> Value:
    """Return the elements times ``scale`` (a float64) as ``target``.

    Floats of up to 32 bits are multiplied in float32, all others in float64. Integers that are converted without a
    scale stay exact, and wrap around if they do not fit.
    """
    n = x.type.count
    if source in THROUGH_FLOAT and target in THROUGH_FLOAT:
        factor = splat(b, b.fptrunc(scale, F32), n)
        return _from_float(b, b.fmul(_to_float(b, x, source), factor), target)
    scaled = _from_double(b, b.fmul(_to_double(b, x, source), splat(b, scale, n)), target)
    if source.is_float or target.is_float:
        return scaled
    exact = _from_long(b, _to_long(b, x, source), target)
    unscaled = b.fcmp_ordered("==", scale, ir.Constant(F64, 1.0))
    return b.select(splat(b, unscaled, n), exact, scaled)


def widen(b: Any, x: Value, dtype: DType, scale: Value) -> Value:
    """Return the elements times ``scale`` in the type of the reduction: 16-bit floats in float32, others unchanged."""
    if dtype in SHORT_FLOATS:
        return b.fmul(_to_float(b, x, dtype), splat(b, b.fptrunc(scale, F32), x.type.count))
    return convert(b, x, dtype, dtype, scale)


def rescale(b: Any, x: Value, dtype: DType, scale: Value) -> Value:
    """Convert widened elements times ``scale`` back to their stored type."""
    return convert(b, x, DType.F32 if dtype in SHORT_FLOATS else dtype, dtype, scale)


def apply(b: Any, op: ReduceOp, dtype: DType, x: Value, y: Value) -> Value:
    """Return ``x op y`` of widened elements; a NaN on either side is the result."""
    if dtype is DType.BOOL:
        x, y = (b.zext(b.icmp_unsigned("!=", z, _constant(z, I8, 0)), _like(z, I8)) for z in (x, y))
        return (b.or_ if op in (ReduceOp.Sum, ReduceOp.Max) else b.and_)(x, y)
    if op is ReduceOp.Sum:
        return b.fadd(x, y) if dtype.is_float else b.add(x, y)
    if op is ReduceOp.Product:
        return b.fmul(x, y) if dtype.is_float else b.mul(x, y)
    relation = "<" if op is ReduceOp.Min else ">"
    if dtype.is_float:  # gives y if either is a NaN; the next line then restores x if x is the NaN
        ordered = b.select(b.fcmp_ordered(relation, x, y), x, y)
        return b.select(b.fcmp_unordered("uno", x, x), x, ordered)
    return b.select((b.icmp_unsigned if dtype in UNSIGNED else b.icmp_signed)(relation, x, y), x, y)
