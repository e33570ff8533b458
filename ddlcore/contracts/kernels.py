"""The kernels contract: functions that copy, scale, cast and reduce the memory of a bucket on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddlcore.types import DType, ReduceOp

__all__ = ["Kernels"]


class Kernels(ABC):
    """The elementary operations on the memory of one kind of device.

    Addresses are in memory of that device. Counts are numbers of elements. All calls release the GIL. Operations on
    16-bit floats compute in float32 and round the result once. Integers are scaled in float64 and truncated.
    """

    @abstractmethod
    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        """Copy several tensors, one after the other, to the memory at ``target``.

        Each value is multiplied by ``scale`` and cast from the type ``dtype`` to the type ``wire``. ``sources`` are the
        addresses of the tensors, and ``counts`` are their numbers of elements.
        """

    @abstractmethod
    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        """Do the reverse of ``pack``: copy elements from the memory at ``source`` to several tensors.

        Each value is multiplied by ``scale`` and cast from the type ``wire`` to the type ``dtype``. ``targets`` are the
        addresses of the tensors, and ``counts`` are their numbers of elements.
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

        s0, s1, … are the tensors at the addresses ``sources``, and i runs from 0 to ``count`` - 1. ``target`` may be
        one of these addresses. ``op`` is Sum, Min, Max or Product. For bool, Sum and Max mean "or", and Min and Product
        mean "and".
        """

    @abstractmethod
    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        """Fill ``count`` elements at ``target`` with the identity element of ``op``, such as 0 for a sum.

        This is for a rank that has joined: it contributes such memory to the collectives of the other ranks.
        """

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        """Multiply the integers at ``source`` by ``scale``, and write the products to ``target`` as int64.

        If ``dtype`` is int64, each product becomes two int64: its high half and its low half. So up to 2^31 such
        results can be added without overflow. Both addresses are in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        """Convert sums of elements that ``widen`` has written to integers of type ``dtype``.

        Each sum at ``source`` is multiplied by ``scale``, divided by ``divisor``, truncated toward zero, and written to
        ``target``. ``count`` is the number of results. If ``scale`` is 1, the result is exact; otherwise it is computed
        in float64. Values that do not fit ``dtype`` wrap around. Both addresses are in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no exact sums")
