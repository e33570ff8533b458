"""Names the core's compressors as Horovod's classes, and lets a user's own class stand beside them."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

__all__ = ["Compression"]


class _None:
    """Values travel as they are."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


class _Fp16:
    """Floats travel as float16, are added in float32, and arrive in their own type."""

    wire: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class _Bf16:
    """Floats travel as bfloat16 (float32's range, 8 bits of precision), are added in float32."""

    wire: ClassVar[str] = "bf16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.bfloat16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """How gradients travel. Beside these: the name of a plugin's compressor, or a class with both methods."""

    none: ClassVar[type[_None]] = _None
    fp16: ClassVar[type[_Fp16]] = _Fp16
    bf16: ClassVar[type[_Bf16]] = _Bf16
