"""Offers the core's compressors under the names of Horovod's ``Compression`` classes."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ["Compression"]


class _None:
    """Sends values unchanged."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Fp16:
    """Sends floats as float16; they are added in float32 and arrive in their original type."""

    wire: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Bf16:
    """Sends floats as bfloat16 (the range of float32, 8 bits of precision); they are added in float32."""

    wire: ClassVar[str] = "bf16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.bfloat16(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The values for ``compression=``, which say how gradients are sent.

    That argument also takes the name of a plugin's compressor, or a class of the user's own with the methods
    ``compress`` and ``decompress``.
    """

    none: ClassVar[type[_None]] = _None
    fp16: ClassVar[type[_Fp16]] = _Fp16
    bf16: ClassVar[type[_Bf16]] = _Bf16
