"""The compressor contract: how the values of a tensor are encoded, so that fewer bytes are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import Buffer, DType

__all__ = ["Compressor"]


class Compressor(ABC):
    """An encoder and decoder of tensor values. One object is used by one job.

    It may keep state for each tensor name, such as the error that was left over (error feedback).

    ``summable``: True if the encoded values of several ranks can be added directly, as ``wire_dtype`` numbers. If
    False, each tensor is cut into one piece for each rank. Every rank encodes each piece under the piece's own name and
    sends it to the rank that adds this piece. That rank decodes the pieces, adds them in float32, encodes the sum and
    sends it to all ranks. So ``encode`` and ``decode`` also get float32 instead of the tensor's type, and each name is
    committed separately.

    ``casts``: True if ``encode`` and ``decode`` do exactly what the kernels' ``pack`` and ``unpack`` do. Then one call
    of ``pack`` or ``unpack`` may replace the calls for a whole bucket, and nothing is committed.

    In process sets other than the global one, the names begin with the set's number. Calls without a name, and
    reducescatter, use the empty name, for which no state must be kept: ``commit("", False)`` follows at once.
    """

    name: str = ""
    summable: bool = True
    casts: bool = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """Return the type as which values of type ``dtype`` are sent; ``dtype`` itself if they are not compressed."""

    def encoded_count(self, dtype: DType, count: int) -> int:
        """Return how many elements of the wire type encode ``count`` values of ``dtype``.

        The number includes elements for scales and other additions. It must be ``count`` for a ``summable`` compressor,
        and for types that the compressor does not change.
        """
        return count

    @abstractmethod
    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Write ``scale * source``, encoded, to ``target``, which has ``encoded_count`` elements of the wire type.

        ``name`` is the tensor's name, under which state may be kept. The state may be changed permanently only in
        ``commit``, because before that, the bucket may still become void.
        """

    @abstractmethod
    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Write ``scale * source``, decoded, to ``target``. ``name`` is the tensor's name, as in ``encode``.

        ``source`` has the wire type, ``target`` the tensor's type.
        """

    def commit(self, name: str, valid: bool) -> None:
        """Make the state change of the last ``encode`` of ``name`` permanent, or drop the change.

        ``valid``: True if the bucket was delivered; False if it was void and will be repeated.
        """
