"""The conformance suite of transports: subclass it, write ``make``, and pytest collects the standard tests."""

from __future__ import annotations

from ddlcore.testing.transport_atomic import TransportEntry
from ddlcore.testing.transport_life import TransportLife
from ddlcore.testing.transport_values import TransportValues

__all__ = ["TransportSuite"]


class TransportSuite(TransportValues, TransportEntry, TransportLife):
    """The transport suite, with ranks that are threads of the test's process; see TransportBase for what can be set.

    >>> class TestMine(TransportSuite):
    ...     def make(self, size):
    ...         return [MyTransport() for _ in range(size)]
    """
