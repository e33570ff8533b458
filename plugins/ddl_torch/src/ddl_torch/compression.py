"""Offers the core's compressors under the names of Horovod's ``Compression`` classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ddlcore.api import FloatCompression, NoCompression


class _Floats(FloatCompression):
    @staticmethod
    def is_float(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class _Fp16(_Floats):
    """The compressor that sends floats as float16. Floats are added in float32, and results have the original type."""

    wire: ClassVar[str] = "fp16"
    narrow: ClassVar[Any] = torch.float16


class _Bf16(_Floats):
    """The compressor that sends floats as bfloat16 (the range of float32, 8 bits of precision).

    Floats are added in float32, and results have the original type.
    """

    wire: ClassVar[str] = "bf16"
    narrow: ClassVar[Any] = torch.bfloat16


class Compression:
    """The values for the argument ``compression``, which selects the type in which gradients are sent.

    That argument also accepts the name of a plugin's compressor, or a class of the user's own with the methods
    ``compress`` and ``decompress``.
    """

    none: ClassVar[type[NoCompression]] = NoCompression
    fp16: ClassVar[type[FloatCompression]] = _Fp16
    bf16: ClassVar[type[FloatCompression]] = _Bf16
