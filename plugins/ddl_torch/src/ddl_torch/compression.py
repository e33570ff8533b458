"""Names the core's compressors as Horovod's classes, and lets a user's own class stand beside them."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ["Compression"]


class _None:
    """Values travel as they are."""

    wire: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Fp16:
    """Floats travel as float16, are added in float32, and arrive in their own type."""

    wire: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Bf16:
    """Floats travel as bfloat16 (float32's range, 8 bits of precision), are added in float32."""

    wire: ClassVar[str] = "bf16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.bfloat16(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """How gradients travel. Beside these: the name of a plugin's compressor, or a class with both methods."""

    none: ClassVar[type[_None]] = _None
    fp16: ClassVar[type[_Fp16]] = _Fp16
    bf16: ClassVar[type[_Bf16]] = _Bf16
