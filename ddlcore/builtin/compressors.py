"""The compressors that keep no state. They send values unchanged or as 16-bit floats; the kernels do the casts."""

from __future__ import annotations

from ddlcore.contracts.compressor import Compressor
from ddlcore.types import Buffer, DType


class _Cast(Compressor):
    """A compressor that only casts and scales. Its subclasses choose the type in which values are sent."""

    casts = True

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.pack([source.address], [source.count], source.dtype, target.address, target.dtype, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.unpack(source.address, source.dtype, [target.address], [target.count], target.dtype, scale)


class NoCompression(_Cast):
    """A compressor that sends every type unchanged."""

    name = "none"

    def wire_dtype(self, dtype: DType) -> DType:
        return dtype


class Fp16Compression(_Cast):
    """A compressor that sends float32 and float64 as float16: 11 significant bits, infinity beyond 65504."""

    name = "fp16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.F16 if dtype in (DType.F32, DType.F64) else dtype


class Bf16Compression(_Cast):
    """A compressor that sends float32 and float64 as bfloat16: 8 significant bits, the range of float32."""

    name = "bf16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.BF16 if dtype in (DType.F32, DType.F64) else dtype
