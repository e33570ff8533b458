"""ddl's standard tests of a compressor, on this one."""

from __future__ import annotations

from ddl_int8.conformance import Int8Suite


class TestInt8(Int8Suite):
    """As `ddl conform int8` runs it."""
