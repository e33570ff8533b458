"""The built-in compressors pass the compressor suite."""

from __future__ import annotations

from ddl_conform.builtin import Bf16Suite, Fp16Suite

from ddlcore.builtin.compressors import Unchanged
from ddlcore.testing import CompressorSuite


class TestNoCompression(CompressorSuite):
    compressor = Unchanged


class TestFp16Compression(Fp16Suite):
    """As `ddl conform fp16` runs it."""


class TestBf16Compression(Bf16Suite):
    """As `ddl conform bf16` runs it."""
