"""Names the core's compressors as Horovod's classes, and lets a user's own class stand beside them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch

__all__ = ["Compression", "UserCompressor", "wire_compression"]


class UserCompressor(Protocol):
    """A class of the user's own: what ``compress`` returns is reduced in the tensor's place."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and whatever ``decompress`` needs to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor in its first type and shape."""


class _None:
    """Values travel as they are."""

    name: ClassVar[str] = "none"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Fp16:
    """Floats travel as float16, are added in float32, and arrive in their own type."""

    name: ClassVar[str] = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Bf16:
    """Floats travel as bfloat16 (float32's range, 8 bits of precision), are added in float32."""

    name: ClassVar[str] = "bf16"

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


def wire_compression(compression: Any) -> tuple[str, UserCompressor | None]:
    """The core's compressor to name, and the user's own to run around it (None: there is none).

    Raises ValueError for what is neither.
    """
    if isinstance(compression, str):
        return compression, None
    if compression in (_None, _Fp16, _Bf16):  # these alone: a subclass that compresses otherwise is the user's own
        return str(compression.name), None
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return "none", compression
    raise ValueError(
        f"compression={compression!r}: use Compression.none, .fp16 or .bf16, the name of a compressor, "
        "or a class with static methods compress(tensor) and decompress(tensor, ctx)"
    )
