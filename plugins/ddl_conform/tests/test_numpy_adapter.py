"""The numpy adapter passes the adapter suite."""

from __future__ import annotations

from ddl_conform.builtin import NumpySuite


class TestNumpyAdapter(NumpySuite):
    """As `ddl conform numpy` runs it."""
