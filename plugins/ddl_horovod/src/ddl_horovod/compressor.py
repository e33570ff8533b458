"""The base class of compressors that a user writes."""

from __future__ import annotations

from typing import Any


class CompressorBase:
    """Horovod's ``Compressor``. The base class of compressors: pass a subclass as ``compression``."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce instead of ``tensor``, and an object of any type that ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return ``tensor``, the reduced tensor, converted back. ``ctx`` is the object that ``compress`` returned."""
        raise NotImplementedError
