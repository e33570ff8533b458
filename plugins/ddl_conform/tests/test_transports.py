"""The built-in transports pass the transport suite."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_conform.threads import ThreadsTransport

from ddlcore.contracts.solo import SoloTransport
from ddlcore.contracts.transport import Transport
from ddlcore.testing import TransportSuite


class TestThreads(TransportSuite):
    offers = ThreadsTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [ThreadsTransport() for _ in range(size)]


class TestSolo(TransportSuite):
    sizes = (1,)

    def make(self, size: int) -> Sequence[Transport]:
        return [SoloTransport()]
