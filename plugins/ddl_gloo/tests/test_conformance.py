"""The conformance kit on Gloo."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_gloo.transport import GlooTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing.transports import TransportSuite


class TestGloo(TransportSuite):
    """Ranks of one host."""

    def make(self, size: int) -> Sequence[Transport]:
        return [GlooTransport() for _ in range(size)]
