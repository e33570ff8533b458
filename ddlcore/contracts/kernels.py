"""The kernels contract: copying, scaling, casting and reducing the memory of a bucket on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddlcore.types import DType, ReduceOp

__all__ = ["Kernels"]


class Kernels(ABC):
    """The elementary operations on the memory of one kind of device.

    Addresses are in memory of that device; counts are numbers of elements; all calls release the GIL. 16-bit floats are
    computed in float32 and rounded once; integers are scaled in float64 and truncated.
    """

    @abstractmethod
    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        """Copy tensors of type ``dtype`` one after the other to ``target``, cast to the type ``wire``.

        Each value is multiplied by ``scale``. ``counts`` are the numbers of elements of the tensors.
        """

    @abstractmethod
    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        """Do the reverse of ``pack``: copy elements of type ``wire`` from ``source`` to tensors of type ``dtype``.

        Each value is multiplied by ``scale``.
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

        ``target`` may be one of the sources. ``op`` is SUM, MIN, MAX or PRODUCT. For bool, SUM and MAX mean "or", and
        MIN and PRODUCT mean "and".
        """

    @abstractmethod
    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        """Fill ``count`` elements at ``target`` with the identity element of ``op``, such as 0 for a sum.

        A rank that has joined contributes such memory.
        """

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        """Write the integers at ``source`` as int64 to ``target``, multiplied by ``scale``.

        An int64 becomes two int64: its high half and its low half. So 2^31 of the results can be added without
        overflow. Addresses are in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        """Convert sums of the elements that ``widen`` wrote back to integers of type ``dtype``.

        Each sum is multiplied by ``scale``, divided by ``divisor`` and truncated toward zero. The result is exact if
        ``scale`` is 1, and otherwise computed in float64. Values that the type cannot hold wrap around. Addresses are
        in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")
