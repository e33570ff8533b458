"""Emits LLVM code that converts vectors of elements to the type of a reduction, and back, with a scale.

The same code runs on the device and, for tests, on the host's processor. This module is imported only for compiling.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ddlcore.contracts.elements import F32, F64, SHORT_FLOATS, Elements, Value, splat
from ddlcore.types import DType

THROUGH_FLOAT = (*SHORT_FLOATS, DType.F32)
_ELEMENTS = Elements()


def convert(b: Any, x: Value, source: DType, target: DType, scale: Value) -> Value:
    """Emit code that multiplies the elements ``x`` by ``scale`` and converts them from ``source`` to ``target``.

    Returns the converted elements. ``b`` is the LLVM builder, and ``scale`` is a float64. Floats of up to 32 bits are
    multiplied in float32, all other elements in float64. Integers that are converted without a scale stay exact, and
    wrap around if they do not fit.
    """
    n = x.type.count
    if source in THROUGH_FLOAT and target in THROUGH_FLOAT:
        factor = splat(b, b.fptrunc(scale, F32), n)
        return _ELEMENTS.from_float(b, b.fmul(_ELEMENTS.to_float(b, x, source), factor), target)
    scaled = _ELEMENTS.from_double(b, b.fmul(_ELEMENTS.to_double(b, x, source), splat(b, scale, n)), target)
    if source.is_float or target.is_float:
        return scaled
    exact = _ELEMENTS.from_long(b, _ELEMENTS.to_long(b, x, source), target)
    unscaled = b.fcmp_ordered("==", scale, ir.Constant(F64, 1.0))
    return b.select(splat(b, unscaled, n), exact, scaled)


def widen(b: Any, x: Value, dtype: DType, scale: Value) -> Value:
    """Emit code that multiplies the elements ``x`` by ``scale``, and return the results in the type of the reduction.

    That type is float32 for 16-bit floats, and ``dtype`` for all other elements.
    """
    if dtype in SHORT_FLOATS:
        return b.fmul(_ELEMENTS.to_float(b, x, dtype), splat(b, b.fptrunc(scale, F32), x.type.count))
    return convert(b, x, dtype, dtype, scale)


def rescale(b: Any, x: Value, dtype: DType, scale: Value) -> Value:
    """Emit code that multiplies reduced elements by ``scale`` and converts them back to their stored type ``dtype``.

    The elements ``x`` have the type that ``widen`` gives. Returns the converted elements.
    """
    return convert(b, x, DType.F32 if dtype in SHORT_FLOATS else dtype, dtype, scale)
