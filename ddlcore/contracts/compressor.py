"""The compressor contract: how a tensor's values are encoded in fewer bytes for sending."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import Buffer, DType

__all__ = ["Compressor"]


class Compressor(ABC):
    """An encoder and decoder of tensor values.

    One object serves one job; it may keep state by tensor name (error feedback).

    ``summable``: True if encoded values of several ranks can be added directly, as ``wire_dtype`` numbers. If False,
    each tensor is cut into one piece per rank. Every rank encodes each piece under the piece's own name and sends it to
    the rank that adds it. That rank decodes the pieces, adds them in float32, encodes the sum and sends it to all
    ranks. So ``encode`` and ``decode`` also get float32 in place of the tensor's type, and each name is committed
    separately.

    ``casts``: True if ``encode`` and ``decode`` do exactly what the kernels' ``pack`` and ``unpack`` do. One call of
    these may then replace the calls for a whole bucket, and nothing is committed.

    Names in process sets other than the global one are prefixed with the set's number. Calls without a name, and
    reducescatter, use the empty name; its state must never be kept: ``commit("", False)`` follows at once.
    """

    name: str = ""
    summable: bool = True
    casts: bool = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """Return the type in which values of ``dtype`` are sent; ``dtype`` itself if they are not compressed."""

    def encoded_count(self, dtype: DType, count: int) -> int:
        """Return how many elements of the wire type encode ``count`` values of ``dtype``.

        The number includes scales and the like. It must be ``count`` for a ``summable`` compressor, and for types that
        the compressor does not change.
        """
        return count

    @abstractmethod
    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Write ``scale * source`` into ``target``, which has ``encoded_count`` elements of the wire type.

        Change the state permanently only in ``commit``: until then, the bucket may turn out to be void.
        """

    @abstractmethod
    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Write ``scale * source`` into ``target``; ``source`` has the wire type, ``target`` the tensor's type."""

    def commit(self, name: str, valid: bool) -> None:
        """End the bucket of the last ``encode`` of ``name``: make the change of its state permanent, or drop it.

        ``valid``: True if the bucket was delivered; False if it was void and will be repeated.
        """
