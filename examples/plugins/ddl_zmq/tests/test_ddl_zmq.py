"""ddl's standard tests of transports, on one host, and across hosts with shared memory within each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ddl_zmq.transport import ZmqTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing import ComposedSuite, TransportSuite


class TestZmq(TransportSuite):
    def make(self, size: int) -> Sequence[Transport]:
        return [ZmqTransport() for _ in range(size)]


class TestAcrossHosts(ComposedSuite):
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {3: (0, 0, 1)}

    def cross(self) -> Transport:
        return ZmqTransport()
