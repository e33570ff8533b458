"""The numpy adapter passes the adapter suite."""

from __future__ import annotations

from typing import Any

from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.testing import AdapterSuite


class TestNumpyAdapter(AdapterSuite):
    adapter = NumpyAdapter()

    def make(self, array: Any) -> Any:
        return array.copy()

    def to_numpy(self, tensor: Any) -> Any:
        return tensor
