"""The built-in compressors, which keep no state: values are sent unchanged or as 16-bit floats.

The kernels convert the values.
"""

from __future__ import annotations

from ddlcore.contracts.compressor import Compressor
from ddlcore.types import Buffer, DType


class _Cast(Compressor):
    """A compressor that only casts and scales values. A subclass chooses the type in which the values are sent."""

    casts = True

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.pack([source.address], [source.count], source.dtype, target.address, target.dtype, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.unpack(source.address, source.dtype, [target.address], [target.count], target.dtype, scale)


class Unchanged(_Cast):
    """A compressor that sends values of every type unchanged."""

    name = "none"

    def wire_dtype(self, dtype: DType) -> DType:
        return dtype


class Fp16Compression(_Cast):
    """A compressor that sends float32 and float64 values as float16.

    A float16 has 11 significant bits. Values beyond 65504 become infinity.
    """

    name = "fp16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.F16 if dtype in (DType.F32, DType.F64) else dtype


class Bf16Compression(_Cast):
    """A compressor that sends float32 and float64 values as bfloat16.

    A bfloat16 has 8 significant bits, and the same range as float32.
    """

    name = "bf16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.BF16 if dtype in (DType.F32, DType.F64) else dtype
