"""Which kernels there are, by name, and what each is called with; knows nothing of how they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddlcore.types import DType, ReduceOp

__all__ = ["COPY", "FILL", "OPS", "ROW_BYTES", "Name", "catalogue", "conversion", "reduction"]

ROW_BYTES = 32  # of the table of chunks: tensor, first element in it, elements, first element in the run
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
OPS = (ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
# What travels as another type where a library does not know its own.
CARRIED = (
    (DType.U16, DType.I32),
    (DType.I16, DType.I32),
    (DType.BOOL, DType.U8),
)
ARGUMENTS = {"copy": "qqqqd", "convert": "qqqqd", "reduce": "qqqqqdd", "fill": "qqqq"}


@dataclass(frozen=True)
class Name:
    """One kernel. ``dtypes``: from and to of a conversion, the one type of a reduction, else none."""

    verb: str  # copy, convert, reduce, fill
    dtypes: tuple[DType, ...] = ()
    op: ReduceOp = ReduceOp.Sum

    @property
    def arguments(self) -> str:
        """q is int64, d float64."""
        return ARGUMENTS[self.verb]

    def __str__(self) -> str:
        op = (self.op.name.lower(),) if self.verb == "reduce" else ()
        return "_".join(("ddl", self.verb, *(dtype.label for dtype in self.dtypes), *op))


COPY = Name("copy")
FILL = Name("fill")


def conversion(source: DType, target: DType, scale: float) -> Name:
    """What packs, unpacks or carries values of one type as another."""
    return COPY if source == target and scale == 1.0 else Name("convert", (source, target))


def reduction(dtype: DType, op: ReduceOp) -> Name:
    """What combines several sources of one type."""
    return Name("reduce", (dtype,), op)


def catalogue() -> Iterator[Name]:
    """Every kernel that a job may come to need. Conversions between yet other types are compiled all the same."""
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
