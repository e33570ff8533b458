"""Describes ddl_int8 to ddl without importing the compressor."""

from __future__ import annotations

from ddlcore.hooks import CompressorProvider, hookimpl

__all__ = ["ddl_compressors"]


@hookimpl
def ddl_compressors() -> list[CompressorProvider]:
    """Return the compressor that ``compression="int8"`` selects."""
    return [
        CompressorProvider(
            name="int8",
            target="ddl_int8.compressor:Int8Compressor",
            doc="floats travel as int8 with a scale for each 256, what rounding costs is added next time",
            suite="ddl_int8.conformance:Int8Suite",
        )
    ]
