"""The conformance kit on Gloo: ranks of one host, and each on a host of its own, where fewer bytes are sent."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_gloo.transport import GlooTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing.transports import TransportSuite
from ddlcore.types import Member


class TestOneHost(TransportSuite):
    """Over the loopback."""

    offers = GlooTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [GlooTransport() for _ in range(size)]


class TestManyHosts(TransportSuite):
    """As the launcher tells of hosts; more ranks than meet directly in a barrier."""

    sizes = (2, 9)
    offers = GlooTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [GlooTransport() for _ in range(size)]

    def members(self, size: int) -> Sequence[Member]:
        return [Member(rank=2 * rank + 1, host=rank) for rank in range(size)]
