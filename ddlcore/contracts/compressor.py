"""The compressor door: how a tensor's values travel in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import Buffer, DType

__all__ = ["Compressor"]


class Compressor(ABC):
    """One object serves one job; it may keep state by tensor name (error feedback).

    ``summable``: encoded values of several ranks may be added as they are, as ``wire_dtype`` numbers.
    If not, shards are exchanged, decoded, added in float32 and gathered again.
    """

    name: str = ""
    summable: bool = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """The type in which values of ``dtype`` travel; ``dtype`` itself where it is left alone."""

    @abstractmethod
    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Writes ``scale * source`` into ``target`` (as many elements, of the wire type).

        State changes for good only in ``commit``: until then the batch may turn out void.
        """

    @abstractmethod
    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Writes ``scale * source`` (of the wire type) into ``target`` (of the tensor's)."""

    def commit(self, name: str, valid: bool) -> None:
        """The batch of the last ``encode`` of ``name`` was delivered, or was void and will come again."""
