"""The conformance suite of the compressor: sets how large its error may be."""

from __future__ import annotations

from ddl_int8.compressor import Int8Compressor
from ddlcore.testing import CompressorSuite

__all__ = ["Int8Suite"]


class Int8Suite(CompressorSuite):
    """The suite that `ddl conform int8` runs."""

    compressor = Int8Compressor
    error = 0.5 / 127  # half a step; 127 steps on each side of 0
