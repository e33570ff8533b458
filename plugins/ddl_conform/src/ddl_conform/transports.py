"""The conformance suite of transports. To test a transport, write a subclass that overrides ``make``."""

from __future__ import annotations

from ddl_conform.transport_atomic import TransportEntry
from ddl_conform.transport_life import TransportLife
from ddl_conform.transport_moves import TransportMoves
from ddl_conform.transport_values import TransportValues

__all__ = ["TransportSuite"]


class TransportSuite(TransportValues, TransportEntry, TransportMoves, TransportLife):
    """The suite of tests that every transport must pass. The ranks are threads of the test's process.

    TransportBase lists the methods and attributes that a subclass may change.

    >>> class TestMine(TransportSuite):
    ...     def make(self, size):
    ...         return [MyTransport() for _ in range(size)]
    """
