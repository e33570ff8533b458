"""ddl's standard tests of compressors, for this compressor."""

from __future__ import annotations

from ddl_int8.conformance import Int8Suite


class TestInt8(Int8Suite):
    """The same suite that `ddl conform int8` runs."""
