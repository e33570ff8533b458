"""Offers the core's compressors under the names of Horovod's ``Compression`` classes."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from ddlcore.api import FloatCompression, NoCompression


class _Floats(FloatCompression):
    @staticmethod
    def is_float(tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


class _Fp16(_Floats):
    """The compressor that sends floats as float16. Floats are added in float32, and results have the original type."""

    wire: ClassVar[str] = "fp16"
    narrow: ClassVar[Any] = tf.float16


class _Bf16(_Floats):
    """The compressor that sends floats as bfloat16 (the range of float32, 8 bits of precision).

    Floats are added in float32, and results have the original type.
    """

    wire: ClassVar[str] = "bf16"
    narrow: ClassVar[Any] = tf.bfloat16


class Compression:
    """The values for the argument ``compression``, which selects the type in which gradients are sent.

    That argument also accepts the name of a plugin's compressor, or a class of the user's own with the methods
    ``compress`` and ``decompress``.
    """

    none: ClassVar[type[NoCompression]] = NoCompression
    fp16: ClassVar[type[FloatCompression]] = _Fp16
    bf16: ClassVar[type[FloatCompression]] = _Bf16
