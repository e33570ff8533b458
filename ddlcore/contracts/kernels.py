"""The kernels contract: moving, scaling, casting and reducing the memory of a bucket on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddlcore.types import DType, ReduceOp

__all__ = ["Kernels"]


class Kernels(ABC):
    """Addresses are of memory on the kernels' device; counts are elements; all calls release the GIL.

    16-bit floats are computed in float32 and rounded once; integers are scaled in float64 and truncated.
    """

    @abstractmethod
    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        """Copies tensors of ``dtype`` one behind the other to ``target``, as ``wire``, each value times ``scale``."""

    @abstractmethod
    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        """The way back: from one run of ``wire`` elements to tensors of ``dtype``, each value times ``scale``."""

    @abstractmethod
    def reduce(
        self,
        sources: Sequence[int],
        target: int,
        count: int,
        dtype: DType,
        op: ReduceOp,
        scale: float = 1.0,
        prescale: float = 1.0,
    ) -> None:
        """target[i] = scale * (prescale * s0[i] op prescale * s1[i] op …), in the order of ``sources``.

        ``target`` may be one of them. ``op`` is SUM, MIN, MAX or PRODUCT; of bool, SUM and MAX are "any",
        MIN and PRODUCT "all".
        """

    @abstractmethod
    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        """Fills memory with the value that changes nothing under ``op``: what a rank that has joined contributes."""

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        """Write integers as int64 (int64 as two: high half, low half), each times ``scale``, so that 2^31 can be added.

        Only of host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        """Write the sums of what ``widen`` wrote as integers: times ``scale``, over ``divisor``, truncated toward zero.

        Exact where ``scale`` is 1, else computed in float64; what the type does not hold wraps around. Only of
        host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")
