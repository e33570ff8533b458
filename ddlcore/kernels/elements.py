"""Emits LLVM code that converts one vector of elements to numbers and back: widening, rounding and storing each type.

Imported only while compiling.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ddlcore.kernels.intrinsics import cgutils
from ddlcore.types import DType

__all__ = [
    "F32",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
    "SHORT_FLOATS",
    "STORED",
    "UNSIGNED",
    "WIDTH",
    "Value",
    "constant",
    "float_to_half",
    "from_double",
    "from_float",
    "from_long",
    "half_to_float",
    "to_double",
    "to_float",
    "to_long",
    "vector",
]

WIDTH = 32  # elements per iteration: a multiple of every machine's vector length, enough to hide latency

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
STORED = {
    DType.U8: I8, DType.I8: I8, DType.U16: I16, DType.I16: I16, DType.I32: I32, DType.I64: I64,
    DType.F16: I16, DType.BF16: I16, DType.F32: F32, DType.F64: F64, DType.BOOL: I8,
}  # fmt: skip
UNSIGNED = (DType.U8, DType.U16)
SHORT_FLOATS = (DType.F16, DType.BF16)

Value = Any  # an llvmlite value; that library has no type annotations


def vector(element: Any) -> Any:
    """Return a vector type of WIDTH elements."""
    return ir.VectorType(element, WIDTH)


def constant(element: Any, value: float) -> Value:
    """Return a vector that contains ``value`` WIDTH times."""
    return ir.Constant(vector(element), [value] * WIDTH)


def _hardware_half() -> bool:
    """Return whether the machine converts float16 itself.

    If not, LLVM would call a function that no library here contains.
    """
    return platform.machine() not in ("x86_64", "AMD64") or bool(llvm.get_host_cpu_features().get("f16c"))


def half_to_float(b: Any, x: Value, hardware: bool) -> Value:
    """Convert float16 bits to float32, with integer operations if the machine has no instruction for it."""
    if hardware:
        return b.fpext(b.bitcast(x, vector(HALF)), vector(F32))
    wide = b.zext(x, vector(I32))
    magnitude = b.and_(wide, constant(I32, 0x7FFF))
    sign = b.shl(b.sub(wide, magnitude), constant(I32, 16))
    shifted = b.shl(magnitude, constant(I32, 13))
    # Multiplying by 2^112 corrects the exponent's bias, also for subnormals; infinity and NaN keep all exponent bits.
    finite = b.bitcast(b.fmul(b.bitcast(shifted, vector(F32)), constant(F32, 2.0**112)), vector(I32))
    special = b.icmp_unsigned(">=", magnitude, constant(I32, 0x7C00))
    return b.bitcast(b.or_(b.select(special, b.or_(shifted, constant(I32, 0x7F800000)), finite), sign), vector(F32))


def float_to_half(b: Any, x: Value, hardware: bool) -> Value:
    """Round float32 to the nearest float16, ties to even.

    The version without a machine instruction follows F. Giesen, "float->half variants" (2012).
    """
    if hardware:
        return b.bitcast(b.fptrunc(x, vector(HALF)), vector(I16))
    bits = b.bitcast(x, vector(I32))
    magnitude = b.and_(bits, constant(I32, 0x7FFFFFFF))
    sign = b.lshr(b.sub(bits, magnitude), constant(I32, 16))
    odd = b.and_(b.lshr(magnitude, constant(I32, 13)), constant(I32, 1))
    normal = b.lshr(b.add(b.add(magnitude, constant(I32, 0xC8000FFF)), odd), constant(I32, 13))
    shifted = b.fadd(b.bitcast(magnitude, vector(F32)), constant(F32, 0.5))  # the adder rounds to 2^-24
    subnormal = b.sub(b.bitcast(shifted, vector(I32)), constant(I32, 0x3F000000))
    finite = b.select(b.icmp_unsigned("<", magnitude, constant(I32, 0x38800000)), subnormal, normal)
    nan = b.icmp_unsigned(">", magnitude, constant(I32, 0x7F800000))
    special = b.select(nan, constant(I32, 0x7E00), constant(I32, 0x7C00))
    big = b.icmp_unsigned(">=", magnitude, constant(I32, 0x47800000))
    return b.trunc(b.or_(b.select(big, special, finite), sign), vector(I16))


def _float_to_bfloat(b: Any, x: Value) -> Value:
    bits = b.bitcast(x, vector(I32))
    odd = b.and_(b.lshr(bits, constant(I32, 16)), constant(I32, 1))
    rounded = b.add(bits, b.add(odd, constant(I32, 0x7FFF)))
    quiet = b.or_(bits, constant(I32, 0x400000))  # a NaN with only low bits set would become infinity
    return b.trunc(b.lshr(b.select(b.fcmp_unordered("uno", x, x), quiet, rounded), constant(I32, 16)), vector(I16))


def _double_to_float_odd(b: Any, x: Value) -> Value:
    """Round float64 to float32 to odd, so that a second rounding, to 16 bits, gives the same as a single rounding."""
    near = b.fptrunc(x, vector(F32))
    back = b.fpext(near, vector(F64))
    bits = b.bitcast(near, vector(I32))
    even = b.icmp_unsigned("==", b.and_(bits, constant(I32, 1)), constant(I32, 0))
    inexact = b.and_(b.fcmp_ordered("!=", back, x), even)
    mask = constant(I64, 0x7FFFFFFFFFFFFFFF)
    above = b.icmp_unsigned(">", b.and_(b.bitcast(back, vector(I64)), mask), b.and_(b.bitcast(x, vector(I64)), mask))
    odd = b.add(bits, b.select(above, constant(I32, -1), constant(I32, 1)))
    return b.bitcast(b.select(inexact, odd, bits), vector(F32))


def to_float(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored elements of a 16-bit float type, or float32, to float32."""
    if dtype is DType.F32:
        return x
    if dtype is DType.F16:
        return half_to_float(b, x, _hardware_half())
    return b.bitcast(b.shl(b.zext(x, vector(I32)), constant(I32, 16)), vector(F32))


def from_float(b: Any, x: Value, dtype: DType) -> Value:
    """Convert float32 to a 16-bit float type, rounded to nearest even, or to float32."""
    if dtype is DType.F32:
        return x
    return float_to_half(b, x, _hardware_half()) if dtype is DType.F16 else _float_to_bfloat(b, x)


def to_double(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored elements of any type to float64."""
    if dtype is DType.F64:
        return x
    if dtype.is_float:
        return b.fpext(to_float(b, x, dtype), vector(F64))
    if dtype is DType.BOOL:
        return b.uitofp(b.icmp_unsigned("!=", x, constant(I8, 0)), vector(F64))
    return (b.uitofp if dtype in UNSIGNED else b.sitofp)(x, vector(F64))


def from_double(b: Any, x: Value, dtype: DType) -> Value:
    """Convert float64 to any type: floats are rounded once, integers truncated, and a bool is True unless the value is
    0.
    """
    if dtype is DType.F64:
        return x
    if dtype is DType.F32:
        return b.fptrunc(x, vector(F32))
    if dtype.is_float:
        return from_float(b, _double_to_float_odd(b, x), dtype)
    if dtype is DType.BOOL:
        return b.zext(b.fcmp_unordered("!=", x, constant(F64, 0.0)), vector(I8))
    # Saturating: the result for a value that does not fit 64 bits would otherwise depend on the machine.
    saturate = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(vector(I64), [vector(F64)]), f"llvm.fptosi.sat.v{WIDTH}i64.v{WIDTH}f64"
    )
    return from_long(b, b.call(saturate, [x]), dtype)


def to_long(b: Any, x: Value, dtype: DType) -> Value:
    """Convert stored integers or bools to int64."""
    if dtype is DType.BOOL:
        return b.zext(b.icmp_unsigned("!=", x, constant(I8, 0)), vector(I64))
    return (b.zext if dtype in UNSIGNED else b.sext)(x, vector(I64))


def from_long(b: Any, x: Value, dtype: DType) -> Value:
    """Convert int64 to an integer type or bool; integers wrap around."""
    if dtype is DType.BOOL:
        return b.zext(b.icmp_unsigned("!=", x, constant(I64, 0)), vector(I8))
    return x if dtype is DType.I64 else b.trunc(x, vector(STORED[dtype]))
