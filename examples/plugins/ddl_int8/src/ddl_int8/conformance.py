"""What the conformance kit is told of the compressor: how much it may lose."""

from __future__ import annotations

from ddl_int8.compressor import Int8Compressor
from ddlcore.testing import CompressorSuite

__all__ = ["Int8Suite"]


class Int8Suite(CompressorSuite):
    """`ddl conform int8` runs it."""

    compressor = Int8Compressor
    error = 0.5 / 127  # half a step, of 127 to each side
