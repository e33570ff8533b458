"""Decides which reductions of integers are computed exactly, and how their values travel meanwhile."""

from __future__ import annotations

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages import Spec
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["Exact", "is_exact"]


def is_exact(spec: Spec, size: int) -> bool:
    """Whether the ranks' values are to be added without overflow: averages, and sums with a factor, of integers.

    The mean of int64 is an int64 whatever their sum is. A plain sum wraps around, as in every framework, and a
    world of one has nothing to add.
    """
    if not spec.dtype.is_integer:
        return False
    if spec.op is ReduceOp.Average:
        return size > 1 or spec.prescale != 1.0 or spec.postscale != 1.0
    return spec.op is ReduceOp.Sum and (spec.prescale != 1.0 or spec.postscale != 1.0)


class Exact(Compressor):
    """Integers travel as int64, those of 64 bits as two: any transport that adds int64 then adds them exactly.

    The sum is divided once, after all levels of a transport have added, and truncated toward zero.
    """

    name = "exact"
    casts = True  # no state: nothing is ever committed

    def __init__(self, kernels: Kernels, spec: Spec, size: int) -> None:
        super().__init__(kernels)
        self.words = 2 if spec.dtype is DType.I64 else 1  # of the wire type, for each element
        self._divisor = size if spec.op is ReduceOp.Average else 1

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.I64

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.widen(source.address, source.count, source.dtype, target.address, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.mean(source.address, target.count, target.dtype, target.address, self._divisor, scale)
