"""Base classes with which a framework's package offers the core's compressors, as Horovod's ``Compression`` does.

When ddl sends tensors, only the name in ``wire`` is used, and the core compresses. ``compress`` and ``decompress`` are
for scripts that call them themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["FloatCompression", "NoCompression"]


class NoCompression:
    """The class by which tensors are sent without compression."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Return the tensor itself, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        """Return the tensor itself."""
        return tensor


class FloatCompression:
    """The base of the classes by which floats are sent in a narrower type. Tensors of other types are not changed.

    A framework defines ``is_float`` and ``cast`` in a subclass, and derives from that one class for each type. Such a
    class must itself define ``wire``, the name of the core's compressor (see ``wire_compression``), and ``narrow``.

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
        """Return the tensor with its elements converted to the type ``dtype``."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return a tensor of floats converted to the type ``narrow``, and its original type.

        For other tensors, returns the tensor itself, and None.
        """
        return (cls.cast(tensor, cls.narrow), tensor.dtype) if cls.is_float(tensor) else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the type that it had before ``compress``.

        ``ctx`` is this type; None means that ``compress`` did not change the tensor.
        """
        return tensor if ctx is None else cls.cast(tensor, ctx)
