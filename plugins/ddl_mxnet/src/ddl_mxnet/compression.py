"""Offers the core's compressors under the names of Horovod's ``Compression`` classes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ddl_mxnet.adapter import BFLOAT16

__all__ = ["Compression"]

_FLOATS = ("float16", "float32", "float64")


def _as(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    """Return a float array in another type, and its own type; for other arrays return the array and None."""
    own = np.dtype(tensor.dtype)
    return (tensor.astype(dtype), own) if own.name in _FLOATS else (tensor, None)


class _None:
    """Sends values unchanged."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


class _Fp16:
    """Sends floats as float16; they are added in float32 and arrive in their original type."""

    wire: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _as(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx)


class _Bf16:
    """Sends floats as bfloat16 (the range of float32, 8 bits of precision); they are added in float32."""

    wire: ClassVar[str] = "bf16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _as(tensor, BFLOAT16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx)


class Compression:
    """The values for ``compression=``, which say how gradients are sent.

    That argument also takes the name of a plugin's compressor, or a class of the user's own with the methods
    ``compress`` and ``decompress``.
    """

    none: ClassVar[type[_None]] = _None
    fp16: ClassVar[type[_Fp16]] = _Fp16
    bf16: ClassVar[type[_Bf16]] = _Bf16
