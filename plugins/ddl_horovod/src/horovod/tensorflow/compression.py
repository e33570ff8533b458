"""The compressors of TensorFlow's gradients, and the class to derive one's own from."""

from __future__ import annotations

from ddl_horovod.compressor import CompressorBase as Compressor
from ddl_tf import (
    Compression,
)

__all__ = [
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
]

NoneCompressor = Compression.none
FP16Compressor = Compression.fp16
