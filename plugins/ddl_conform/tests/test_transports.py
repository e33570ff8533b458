"""The built-in transports pass the transport suite; for shm on threads see test_conform.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from ddlcore.builtin.solo import SoloTransport
from ddlcore.builtin.threads import ThreadsTransport
from ddlcore.contracts.transport import Transport
from ddlcore.testing import ProcessSuite, TransportSuite


class TestThreads(TransportSuite):
    offers = ThreadsTransport.capabilities

    def make(self, size: int) -> Sequence[Transport]:
        return [ThreadsTransport() for _ in range(size)]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestShmProcesses(ProcessSuite):
    sizes = (3,)
    target = "ddlcore.builtin.shm.transport:ShmTransport"


class TestSolo(TransportSuite):
    sizes = (1,)

    def make(self, size: int) -> Sequence[Transport]:
        return [SoloTransport()]
