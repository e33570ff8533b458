"""The built-in compressors pass the compressor suite."""

from __future__ import annotations

from ddlcore.builtin.compressors import Bf16Compression, Fp16Compression, NoCompression
from ddlcore.testing import CompressorSuite


class TestNoCompression(CompressorSuite):
    compressor = NoCompression


class TestFp16Compression(CompressorSuite):
    compressor = Fp16Compression
    error = 2.0**-11  # half a unit of float16's last place


class TestBf16Compression(CompressorSuite):
    compressor = Bf16Compression
    error = 2.0**-8  # half a unit of bfloat16's last place
