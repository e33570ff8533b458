"""Names the core's compressors as Horovod's classes; a user's own class may be used in their place."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

__all__ = ["Compression"]


class _None:
    """No compression: values are sent as they are."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


class _Fp16:
    """Floats are sent as float16, added in float32, and returned in their own type."""

    wire: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class _Bf16:
    """Floats are sent as bfloat16 (the range of float32, 8 bits of precision), and added in float32."""

    wire: ClassVar[str] = "bf16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.bfloat16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The types in which gradients are sent. A compressor's name, or a class with both methods, may be used instead."""

    none: ClassVar[type[_None]] = _None
    fp16: ClassVar[type[_Fp16]] = _Fp16
    bf16: ClassVar[type[_Bf16]] = _Bf16
