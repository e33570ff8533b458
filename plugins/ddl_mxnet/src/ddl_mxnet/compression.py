"""Offers the core's compressors under the names of Horovod's ``Compression`` classes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ddl_mxnet.adapter import BFLOAT16
from ddlcore.api import FloatCompression, NoCompression


class _Floats(FloatCompression):
    @staticmethod
    def is_float(tensor: Any) -> bool:
        return np.dtype(tensor.dtype).name in ("float16", "float32", "float64")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class _Fp16(_Floats):
    """The compressor that sends floats as float16. They are added in float32 and arrive in their original type."""

    wire: ClassVar[str] = "fp16"
    narrow: ClassVar[Any] = np.dtype("float16")


class _Bf16(_Floats):
    """The compressor that sends floats as bfloat16, which has the range of float32 and 8 bits of precision.

    They are added in float32, and arrive in their original type.
    """

    wire: ClassVar[str] = "bf16"
    narrow: ClassVar[Any] = BFLOAT16


class Compression:
    """The values for ``compression=``, which say how gradients are sent.

    That argument also takes the name of a plugin's compressor, or a class of the user's own with the methods
    ``compress`` and ``decompress``.
    """

    none: ClassVar[type[NoCompression]] = NoCompression
    fp16: ClassVar[type[FloatCompression]] = _Fp16
    bf16: ClassVar[type[FloatCompression]] = _Bf16
