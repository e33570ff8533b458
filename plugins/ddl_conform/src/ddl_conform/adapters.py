"""The conformance suite of adapters.

To test an adapter, write a subclass that sets ``adapter`` and overrides ``make`` and ``to_numpy``.
"""

from __future__ import annotations

from ddl_conform.adapter_carried import AdapterCarried
from ddl_conform.adapter_memory import AdapterMemory
from ddl_conform.adapter_requests import AdapterRequests
from ddl_conform.adapter_verbs import AdapterVerbs

__all__ = ["AdapterSuite"]


class AdapterSuite(AdapterMemory, AdapterVerbs, AdapterRequests, AdapterCarried):
    """The suite of tests that every adapter must pass.

    AdapterBase lists the methods that a subclass must write, and the attributes that a subclass may set.

    >>> class TestMine(AdapterSuite):
    ...     adapter = MyAdapter()
    ...     def make(self, array):
    ...         return mine.from_numpy(array.copy())
    ...     def to_numpy(self, tensor):
    ...         return tensor.numpy()
    """
