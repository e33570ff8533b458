"""The compressor contract: how a compressor encodes the values of a tensor, so that fewer bytes are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import Buffer, DType

__all__ = ["Compressor"]


class Compressor(ABC):
    """An encoder and decoder of tensor values. Each job has its own object.

    A compressor may keep state for each tensor name, such as the error that an encoding has left over (error feedback).

    ``summable``: True if the encoded values of several ranks can be added directly, as numbers of the type
    ``wire_dtype``. If False, each tensor is cut into one piece for each rank. Every rank encodes each piece under the
    piece's own name, and sends the encoded piece to the rank that adds this piece. That rank decodes the pieces, adds
    them in float32, encodes the sum, and sends the encoded sum to all ranks. So ``encode`` and ``decode`` are also
    called with float32 values instead of values of the tensor's type, and ``commit`` is called for each piece's name.

    ``casts``: True if ``encode`` has exactly the same effect as the kernels' ``pack``, and ``decode`` the same effect
    as ``unpack``. Then one call of ``pack`` or ``unpack`` may replace the calls for a whole bucket, and ``commit`` is
    not called.

    In process sets other than the global one, the names begin with the set's number. Calls without a name, and
    reducescatter, use the empty name. No state must be kept for the empty name: ``commit("", False)`` is called
    immediately after each such ``encode``.
    """

    name: str = ""
    summable: bool = True
    casts: bool = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """Return the wire type: the type in which encoded values of the type ``dtype`` are sent.

        Return ``dtype`` itself if this compressor does not compress values of that type.
        """

    def encoded_count(self, dtype: DType, count: int) -> int:
        """Return how many elements of the wire type encode ``count`` values of ``dtype``.

        The number includes elements for scales and other additional data. The number must be ``count`` for a
        ``summable`` compressor, and for types that the compressor does not compress.
        """
        return count

    @abstractmethod
    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Encode the values of ``source``, each multiplied by ``scale``, and write the result to ``target``.

        ``target`` has ``encoded_count`` elements of the wire type. ``name`` is the tensor's name; state may be kept for
        each name. The state may be changed permanently only in ``commit``, because the bucket may become void before
        ``commit`` is called.
        """

    @abstractmethod
    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        """Decode the values of ``source``, multiply them by ``scale``, and write the result to ``target``.

        ``source`` has the wire type, and ``target`` has the tensor's type. ``name`` is the tensor's name.
        """

    def commit(self, name: str, valid: bool) -> None:
        """Keep or undo the change of state that the last ``encode`` for ``name`` has made.

        ``valid``: True if the bucket has a valid result, so that the change must be kept permanently. False if the
        bucket was void and will be repeated, so that the change must be undone.
        """
