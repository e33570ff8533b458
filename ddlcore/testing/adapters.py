"""The conformance suite of adapters.

A plugin's test is a subclass that sets ``adapter`` and has ``make`` and ``to_numpy``.
"""

from __future__ import annotations

from ddlcore.testing.adapter_memory import AdapterMemory
from ddlcore.testing.adapter_requests import AdapterRequests
from ddlcore.testing.adapter_verbs import AdapterVerbs

__all__ = ["AdapterSuite"]


class AdapterSuite(AdapterMemory, AdapterVerbs, AdapterRequests):
    """The adapter suite; see AdapterBase for what a subclass must write and what it may set.

    >>> class TestMine(AdapterSuite):
    ...     adapter = MyAdapter()
    ...     def make(self, array):
    ...         return mine.from_numpy(array.copy())
    ...     def to_numpy(self, tensor):
    ...         return tensor.numpy()
    """
