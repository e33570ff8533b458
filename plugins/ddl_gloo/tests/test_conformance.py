"""The conformance kit on Gloo: all ranks on one host, and each rank on its own host, where message limits are lower."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ddl_conform.transports import TransportSuite
from ddl_gloo.transport import GlooTransport

from ddlcore.contracts.transport import Transport
from ddlcore.types import Member


class TestOneHost(TransportSuite):
    """All ranks on one host, over the loopback interface."""

    offers = GlooTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [GlooTransport() for _ in range(size)]


@pytest.mark.long
class TestManyHosts(TransportSuite):
    """Hosts as the launcher reports them, with more ranks than the direct barrier supports."""

    sizes = (2, 9)
    offers = GlooTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [GlooTransport() for _ in range(size)]

    def members(self, size: int) -> Sequence[Member]:
        return [Member(rank=2 * rank + 1, host=rank) for rank in range(size)]
