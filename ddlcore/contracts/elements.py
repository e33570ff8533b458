"""Emits LLVM code that converts, rounds and combines vectors of elements, for any processor.

The kernels of the host and of devices use this module. The emitted code contains only operations that the old LLVM
dialect of NVVM has. Only code that compiles kernels imports this module, because this module imports llvmlite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ddlcore.types import DType, ReduceOp

__all__ = [
    "F32",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
    "SHORT_FLOATS",
    "STORED",
    "Elements",
    "Value",
    "apply",
    "splat",
    "vector",
]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
STORED = {
    DType.U8: I8, DType.I8: I8, DType.U16: I16, DType.I16: I16, DType.I32: I32, DType.I64: I64,
    DType.F16: I16, DType.BF16: I16, DType.F32: F32, DType.F64: F64, DType.BOOL: I8,
}  # fmt: skip
UNSIGNED = (DType.U8, DType.U16)
SHORT_FLOATS = (DType.F16, DType.BF16)

Value = Any  # an llvmlite value; that library has no type annotations


def vector(element: Any, n: int) -> Any:
    """Return the LLVM type of a vector of ``n`` elements of the LLVM type ``element``."""
    return ir.VectorType(element, n)


def splat(b: Any, scalar: Value, n: int) -> Value:
    """Emit code that makes a vector of ``n`` copies of ``scalar``, and return the vector. ``b``: the LLVM builder."""
    empty = ir.Constant(vector(scalar.type, n), ir.Undefined)
    first = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, ir.Constant(vector(I32, n), [0] * n))


def _like(x: Value, element: Any) -> Any:
    return vector(element, x.type.count)


def _constant(x: Value, element: Any, value: float) -> Value:
    """Return a constant vector with as many elements as ``x``.

    Each element is ``value``, converted to the LLVM type ``element``.
    """
    return ir.Constant(_like(x, element), [value] * x.type.count)


def apply(b: Any, op: ReduceOp, dtype: DType, x: Value, y: Value) -> Value:
    """Emit code that computes ``x op y`` for each pair of elements of two vectors, and return the result.

    ``dtype`` is the type of the elements. 16-bit floats must be converted to float32 before. If one element of a pair
    is a NaN, the result for that pair is a NaN, as in numpy.
    """
    if dtype is DType.BOOL:
        x, y = (b.zext(b.icmp_unsigned("!=", z, _constant(z, I8, 0)), _like(z, I8)) for z in (x, y))
        return (b.or_ if op in (ReduceOp.Sum, ReduceOp.Max) else b.and_)(x, y)
    if op is ReduceOp.Sum:
        return b.fadd(x, y) if dtype.is_float else b.add(x, y)
    if op is ReduceOp.Product:
        return b.fmul(x, y) if dtype.is_float else b.mul(x, y)
    relation = "<" if op is ReduceOp.Min else ">"
    if dtype.is_float:  # gives y if x or y is a NaN; the next line replaces it by x if x is a NaN
        ordered = b.select(b.fcmp_ordered(relation, x, y), x, y)
        return b.select(b.fcmp_unordered("uno", x, x), x, ordered)
    return b.select((b.icmp_unsigned if dtype in UNSIGNED else b.icmp_signed)(relation, x, y), x, y)


@dataclass(frozen=True)
class Elements:
    """The conversions of vectors between the types of tensors in memory and float32, float64 or int64.

    Each method emits code by the LLVM builder ``b`` for the vector ``x``, and returns the converted vector. ``dtype``
    is the type of the tensor.
    """

    hardware_half: bool = True  # the processor converts float16; if False, integer operations are emitted instead

    def to_float(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert elements of the type ``dtype``, a 16-bit float type or float32, to float32."""
        if dtype is DType.F32:
            return x
        if dtype is DType.F16:
            return self._half_to_float(b, x)
        return b.bitcast(b.shl(b.zext(x, _like(x, I32)), _constant(x, I32, 16)), _like(x, F32))

    def from_float(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert float32 elements to the type ``dtype``, a 16-bit float type (rounded to nearest even) or float32."""
        if dtype is DType.F32:
            return x
        if dtype is DType.F16:
            return self._float_to_half(b, x)
        bits = b.bitcast(x, _like(x, I32))
        odd = b.and_(b.lshr(bits, _constant(x, I32, 16)), _constant(x, I32, 1))
        rounded = b.add(bits, b.add(odd, _constant(x, I32, 0x7FFF)))
        quiet = b.or_(bits, _constant(x, I32, 0x400000))  # a NaN with only low bits set would round to infinity
        kept = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
        return b.trunc(b.lshr(kept, _constant(x, I32, 16)), _like(x, I16))

    def to_double(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert elements of the type ``dtype``, which may be any type, to float64."""
        if dtype is DType.F64:
            return x
        if dtype.is_float:
            return b.fpext(self.to_float(b, x, dtype), _like(x, F64))
        return b.sitofp(self.to_long(b, x, dtype), _like(x, F64))

    def from_double(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert float64 elements to the type ``dtype``, which may be any type.

        For float types the value is rounded once. For integer types it is truncated. For bool the result is true if the
        element is not 0.
        """
        if dtype is DType.F64:
            return x
        if dtype is DType.F32:
            return b.fptrunc(x, _like(x, F32))
        if dtype.is_float:
            return self.from_float(b, _double_to_float_odd(b, x), dtype)
        if dtype is DType.BOOL:
            return b.zext(b.fcmp_unordered("!=", x, _constant(x, F64, 0.0)), _like(x, I8))
        return self.from_long(b, _truncated(b, x), dtype)

    def to_long(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert elements of the type ``dtype``, an integer type or bool, to int64."""
        if dtype is DType.BOOL:
            return b.zext(b.icmp_unsigned("!=", x, _constant(x, I8, 0)), _like(x, I64))
        if dtype is DType.I64:
            return x
        return (b.zext if dtype in UNSIGNED else b.sext)(x, _like(x, I64))

    def from_long(self, b: Any, x: Value, dtype: DType) -> Value:
        """Convert int64 elements to the type ``dtype``, an integer type or bool. Values that do not fit wrap around."""
        if dtype is DType.BOOL:
            return b.zext(b.icmp_unsigned("!=", x, _constant(x, I64, 0)), _like(x, I8))
        return x if dtype is DType.I64 else b.trunc(x, _like(x, STORED[dtype]))

    def _half_to_float(self, b: Any, x: Value) -> Value:
        if self.hardware_half:
            return b.fpext(b.bitcast(x, _like(x, HALF)), _like(x, F32))
        wide = b.zext(x, _like(x, I32))
        magnitude = b.and_(wide, _constant(x, I32, 0x7FFF))
        sign = b.shl(b.sub(wide, magnitude), _constant(x, I32, 16))
        shifted = b.shl(magnitude, _constant(x, I32, 13))
        # Multiplying by 2^112 corrects the exponent's bias, also for subnormals; infinity and NaN keep all exponent
        # bits.
        product = b.fmul(b.bitcast(shifted, _like(x, F32)), _constant(x, F32, 2.0**112))
        special = b.icmp_unsigned(">=", magnitude, _constant(x, I32, 0x7C00))
        infinite = b.or_(shifted, _constant(x, I32, 0x7F800000))
        return b.bitcast(b.or_(b.select(special, infinite, b.bitcast(product, _like(x, I32))), sign), _like(x, F32))

    def _float_to_half(self, b: Any, x: Value) -> Value:
        """Convert float32 elements to the nearest float16, ties to even.

        Without hardware support, the code uses the integer operations of F. Giesen, "float->half variants".
        """
        if self.hardware_half:
            return b.bitcast(b.fptrunc(x, _like(x, HALF)), _like(x, I16))
        bits = b.bitcast(x, _like(x, I32))
        magnitude = b.and_(bits, _constant(x, I32, 0x7FFFFFFF))
        sign = b.lshr(b.sub(bits, magnitude), _constant(x, I32, 16))
        odd = b.and_(b.lshr(magnitude, _constant(x, I32, 13)), _constant(x, I32, 1))
        normal = b.lshr(b.add(b.add(magnitude, _constant(x, I32, 0xC8000FFF)), odd), _constant(x, I32, 13))
        shifted = b.fadd(b.bitcast(magnitude, _like(x, F32)), _constant(x, F32, 0.5))  # the adder rounds to 2^-24
        subnormal = b.sub(b.bitcast(shifted, _like(x, I32)), _constant(x, I32, 0x3F000000))
        finite = b.select(b.icmp_unsigned("<", magnitude, _constant(x, I32, 0x38800000)), subnormal, normal)
        nan = b.icmp_unsigned(">", magnitude, _constant(x, I32, 0x7F800000))
        special = b.select(nan, _constant(x, I32, 0x7E00), _constant(x, I32, 0x7C00))
        big = b.icmp_unsigned(">=", magnitude, _constant(x, I32, 0x47800000))
        return b.trunc(b.or_(b.select(big, special, finite), sign), _like(x, I16))


def _double_to_float_odd(b: Any, x: Value) -> Value:
    """Emit code that converts float64 elements to float32, rounded to odd, and return the result.

    Rounding to odd has this effect: a second rounding, to a 16-bit type, gives the same value as a single rounding of
    the float64.
    """
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


def _truncated(b: Any, x: Value) -> Value:
    """Emit code that converts float64 elements to int64, rounded toward zero, and return the result.

    A value out of the range of int64 becomes the nearest limit of the range. A NaN becomes 0.
    """
    least, most = _constant(x, F64, -(2.0**63)), _constant(x, F64, 2.0**63)
    fits = b.and_(b.fcmp_ordered(">=", x, least), b.fcmp_ordered("<", x, most))
    whole = b.fptosi(b.select(fits, x, _constant(x, F64, 0.0)), _like(x, I64))
    whole = b.select(b.fcmp_ordered(">=", x, most), _constant(x, I64, 2**63 - 1), whole)
    return b.select(b.fcmp_ordered("<", x, least), _constant(x, I64, -(2**63)), whole)
