"""Starts ``ddl`` as tests/launch does."""

from __future__ import annotations

from tests.launch.conftest import _kernels_are_compiled, begin, begun, ddl, until

__all__ = ["_kernels_are_compiled", "begin", "begun", "ddl", "until"]
