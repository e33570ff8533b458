"""The compressor contract: how a tensor's values travel in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import Buffer, DType

__all__ = ["Compressor"]


class Compressor(ABC):
    """One object serves one job; it may keep state by tensor name (error feedback).

    ``summable``: encoded values of several ranks may be added as they are, as ``wire_dtype`` numbers.
    If not, each tensor is cut into one piece a rank; every rank encodes its pieces under names of their own and sends
    each to the rank that adds it, which decodes them, adds them in float32, encodes the sum and sends it to all. So
    ``encode`` and ``decode`` also meet float32 in place of the tensor's type, and each name is committed by itself.
    Names of other process sets than the global one have its number before them. What was called without a name, and
    reducescatter, comes under the empty name, whose state is never to be kept: ``commit("", False)`` follows at once.
    ``casts``: ``encode`` and ``decode`` do nothing but the kernels' ``pack`` and ``unpack``, so that those of a
    whole bucket may be one call of these in their place; nothing is committed.
    """

    name: str = ""
    summable: bool = True
    casts: bool = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """The type in which values of ``dtype`` travel; ``dtype`` itself where it is left alone."""

    def encoded_count(self, dtype: DType, count: int) -> int:
        """How many elements of the wire type ``count`` values of ``dtype`` become, scales and the like included.

        As many where it is ``summable``, and for types that it leaves alone.
        """
        return count

    @abstractmethod
    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Writes ``scale * source`` into ``target`` (``encoded_count`` elements, of the wire type).

        State changes for good only in ``commit``: until then the bucket may turn out void.
        """

    @abstractmethod
    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Writes ``scale * source`` (of the wire type) into ``target`` (of the tensor's)."""

    def commit(self, name: str, valid: bool) -> None:
        """The bucket of the last ``encode`` of ``name`` was delivered, or was void and will come again."""
