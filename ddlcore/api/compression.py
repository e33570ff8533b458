"""The classes by which a framework's package offers the core's compressors, as Horovod's ``Compression`` does.

Where tensors are sent, only the name in ``wire`` counts, and the core compresses. ``compress`` and ``decompress`` are
for scripts that call them themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["FloatCompression", "NoCompression"]


class NoCompression:
    """Sends values unchanged."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        """Return the tensor itself."""
        return tensor


class FloatCompression:
    """The base of the classes that send floats in a narrower type; tensors of other types are sent as they are.

    A framework writes ``is_float`` and ``cast`` in a class of its own, and derives one class for each type. That class
    defines ``wire``, the name of the compressor of the core, itself (see ``wire_compression``), and ``narrow``.

    >>> class Fp16(MyFloats):
    ...     wire = "fp16"
    ...     narrow = mine.float16
    """

    narrow: ClassVar[Any]  # the framework's type in which values are sent

    @staticmethod
    def is_float(tensor: Any) -> bool:
        """Return whether the tensor's elements are floating-point numbers."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another type."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return a tensor of floats in the narrower type, and its own type; else the tensor itself, and None."""
        return (cls.cast(tensor, cls.narrow), tensor.dtype) if cls.is_float(tensor) else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the type ``ctx`` that it had before ``compress``."""
        return tensor if ctx is None else cls.cast(tensor, ctx)
