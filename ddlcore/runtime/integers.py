"""Decides which reductions of integers are computed without overflow, and encodes the integers of these reductions."""

from __future__ import annotations

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages.spec import Spec
from ddlcore.types import Buffer, DType, ReduceOp


def is_exact(spec: Spec, size: int) -> bool:
    """Return whether the reduction that ``spec`` describes must add integers without overflow.

    This is True for averages and scaled sums of integers: the mean of int64 values fits into an int64 even if their sum
    does not. It is False for a plain sum, which may wrap around, as in every framework. If ``size`` is 1, an average
    that has no scale factors is not exact either, because nothing is added.
    """
    if not spec.dtype.is_integer:
        return False
    if spec.op is ReduceOp.Average:
        return size > 1 or spec.prescale != 1.0 or spec.postscale != 1.0
    return spec.op is ReduceOp.Sum and (spec.prescale != 1.0 or spec.postscale != 1.0)


class Exact(Compressor):
    """A compressor that encodes each integer as one int64, or as two int64 if the integer itself has 64 bits.

    So every transport that can add int64 values adds the integers without overflow. The sum is divided only once, after
    all levels of a transport have added, and the result is truncated toward zero.
    """

    name = "exact"
    casts = True  # it has no state, so nothing is ever committed

    def __init__(self, kernels: Kernels, spec: Spec, size: int) -> None:
        super().__init__(kernels)
        self.words = 2 if spec.dtype is DType.I64 else 1  # elements of the wire type for each element
        self._divisor = size if spec.op is ReduceOp.Average else 1

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.I64

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.widen(source.address, source.count, source.dtype, target.address, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.mean(source.address, target.count, target.dtype, target.address, self._divisor, scale)
