"""The compressors without state: values travel as they are, or as 16-bit floats; the kernels do the casting."""

from __future__ import annotations

from ddlcore.contracts.compressor import Compressor
from ddlcore.types import Buffer, DType

__all__ = ["Bf16Compression", "Fp16Compression", "NoCompression"]


class _Cast(Compressor):
    """Encodes and decodes by a cast, with the scale in it; the subclass names the type."""

    casts = True

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.pack([source.address], [source.count], source.dtype, target.address, target.dtype, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.unpack(source.address, source.dtype, [target.address], [target.count], target.dtype, scale)


class NoCompression(_Cast):
    """Every type travels as it is."""

    name = "none"

    def wire_dtype(self, dtype: DType) -> DType:
        return dtype


class Fp16Compression(_Cast):
    """float32 and float64 travel as float16: 11 significant bits, infinite beyond 65504."""

    name = "fp16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.F16 if dtype in (DType.F32, DType.F64) else dtype


class Bf16Compression(_Cast):
    """float32 and float64 travel as bfloat16: 8 significant bits, float32's range."""

    name = "bf16"

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.BF16 if dtype in (DType.F32, DType.F64) else dtype
