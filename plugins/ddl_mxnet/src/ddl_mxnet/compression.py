"""The class ``Compression``, whose attributes are compressors with the same names as in Horovod."""

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
    """The compressor that sends floats as float16.

    The values are added in float32, and arrive in their original type.
    """

    wire: ClassVar[str] = "fp16"
    narrow: ClassVar[Any] = np.dtype("float16")


class _Bf16(_Floats):
    """The compressor that sends floats as bfloat16, which has the range of float32 and 8 bits of precision.

    The values are added in float32, and arrive in their original type.
    """

    wire: ClassVar[str] = "bf16"
    narrow: ClassVar[Any] = BFLOAT16


class Compression:
    """The values for the argument ``compression``, which say in which type gradients are sent.

    The argument may also be the name of a plugin's compressor, or a class that the user has written and that has the
    methods ``compress`` and ``decompress``.
    """

    none: ClassVar[type[NoCompression]] = NoCompression
    fp16: ClassVar[type[FloatCompression]] = _Fp16
    bf16: ClassVar[type[FloatCompression]] = _Bf16
