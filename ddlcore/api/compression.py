"""Base classes of the compression classes in a framework's package, such as those in Horovod's ``Compression``.

The core compresses the tensors that ddl sends. For this, it uses only one attribute of a compression class: ``wire``,
the name of the core's compressor. The methods ``compress`` and ``decompress`` are for scripts that call them directly.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["FloatCompression", "NoCompression"]


class NoCompression:
    """The compression class for tensors that are sent without compression."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Return the pair (``tensor``, None): the tensor is not changed."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        """Return ``tensor`` itself. ``ctx`` is not used."""
        return tensor


class FloatCompression:
    """The base class of compression classes that convert floats to a narrower type. Other tensors are not changed.

    A framework's package defines ``is_float`` and ``cast`` in a subclass. From that subclass, the package derives one
    class for each narrow type. Each of these classes must itself define ``wire``, the name of the core's compressor
    (see ``wire_compression``), and ``narrow``, the framework's type.

    >>> class Fp16(MyFloats):
    ...     wire = "fp16"
    ...     narrow = mine.float16
    """

    narrow: ClassVar[Any]  # the framework's type in which values are sent

    @staticmethod
    def is_float(tensor: Any) -> bool:
        """Return whether the elements of ``tensor`` are floating-point numbers."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return a tensor with the elements of ``tensor`` converted to the framework's type ``dtype``."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return two values: the tensor converted to the type ``narrow``, and the tensor's original type.

        If the elements of ``tensor`` are not floats, return ``tensor`` itself and None.
        """
        return (cls.cast(tensor, cls.narrow), tensor.dtype) if cls.is_float(tensor) else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` converted back to the type that it had before ``compress``.

        ``ctx`` is the second value that ``compress`` returned: the original type, or None if ``compress`` did not
        change the tensor.
        """
        return tensor if ctx is None else cls.cast(tensor, ctx)
