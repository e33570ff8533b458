"""The names of all kernels, and the argument types of each kernel. The kernels themselves are in kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddlcore.types import DType, ReduceOp

ROW_BYTES = 32  # of the table of chunks: tensor, first element in it, element count, first element in the run
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
OPS = (ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
# Types that are sent as another type if a library does not support them.
CARRIED = (
    (DType.U16, DType.I32),
    (DType.I16, DType.I32),
    (DType.BOOL, DType.U8),
)
ARGUMENTS = {"copy": "qqqqd", "convert": "qqqqd", "reduce": "qqqqqdd", "fill": "qqqq"}


@dataclass(frozen=True)
class Name:
    """The name of one kernel.

    ``dtypes`` contains the source type and the target type of a conversion, or the one type of a reduction. Otherwise
    it is empty. ``op`` is the operation of a reduction.
    """

    verb: str  # copy, convert, reduce, fill
    dtypes: tuple[DType, ...] = ()
    op: ReduceOp = ReduceOp.Sum

    @property
    def arguments(self) -> str:
        """The types of the kernel's arguments, one letter for each: q is int64, d is float64."""
        return ARGUMENTS[self.verb]

    def __str__(self) -> str:
        op = (self.op.name.lower(),) if self.verb == "reduce" else ()
        return "_".join(("ddl", self.verb, *(dtype.label for dtype in self.dtypes), *op))


COPY = Name("copy")
FILL = Name("fill")


def conversion(source: DType, target: DType, scale: float) -> Name:
    """Return the name of the kernel that packs or unpacks tensors, and converts them from ``source`` to ``target``.

    If the types are equal and ``scale`` is 1.0, this is the kernel that only copies.
    """
    return COPY if source == target and scale == 1.0 else Name("convert", (source, target))


def reduction(dtype: DType, op: ReduceOp) -> Name:
    """Return the name of the kernel that reduces several sources of the type ``dtype`` by the operation ``op``."""
    return Name("reduce", (dtype,), op)


def catalogue() -> Iterator[Name]:
    """Yield the names of the kernels that jobs usually need.

    Kernels for other conversions are compiled at first use.
    """
    yield COPY
    yield FILL
    for dtype in DType:
        yield Name("convert", (dtype, dtype))
    for source in FLOATS:
        for target in FLOATS:
            if source != target:
                yield Name("convert", (source, target))
    for near, far in CARRIED:
        yield Name("convert", (near, far))
        yield Name("convert", (far, near))
    for dtype in DType:
        for op in OPS:
            yield reduction(dtype, op)
