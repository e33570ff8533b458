"""The kernels contract: moving, scaling, casting and reducing the memory of a bucket on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddlcore.types import DType, ReduceOp

__all__ = ["Kernels"]


class Kernels(ABC):
    """The elementary memory operations on one kind of device.

    Addresses are of memory on the kernels' device; counts are in elements; all calls release the GIL. 16-bit floats are
    computed in float32 and rounded once; integers are scaled in float64 and truncated.
    """

    @abstractmethod
    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        """Copy tensors of ``dtype`` one after the other to ``target``, cast to ``wire``, each value multiplied by
        ``scale``.
        """

    @abstractmethod
    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        """Do the reverse of ``pack``: copy ``wire`` elements at ``source`` to tensors of ``dtype``, multiplied by
        ``scale``.
        """

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
        """Compute target[i] = scale * (prescale * s0[i] op prescale * s1[i] op …), in the order of ``sources``.

        ``target`` may be one of the sources. ``op`` is SUM, MIN, MAX or PRODUCT; for bool, SUM and MAX mean "any", and
        MIN and PRODUCT mean "all".
        """

    @abstractmethod
    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        """Fill memory with the identity element of ``op``, which is what a rank that has joined contributes."""

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        """Write integers as int64, multiplied by ``scale``, so that 2^31 of them can be added without overflow.

        An int64 becomes two int64: its high half and its low half. Only host memory is supported.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        """Convert sums of what ``widen`` wrote back to integers.

        Each sum is multiplied by ``scale``, divided by ``divisor`` and truncated toward zero. The result is exact if
        ``scale`` is 1, and else computed in float64. Values that the type cannot hold wrap around. Only host memory is
        supported.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")
