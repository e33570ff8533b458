"""The hierarchical transport passes the transport suite, however ranks lie on hosts, whatever serves a host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
from ddl_conform.threads import ThreadsTransport
from ddl_shm.transport import ShmTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing import ComposedSuite


class OverThreads(ComposedSuite):
    """Threads across hosts, too."""

    def cross(self) -> Transport:
        return ThreadsTransport()


class TestUneven(OverThreads):
    """Hosts with fewer ranks than others, and with one alone; the first rank of each crosses."""

    shares = 1
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {3: (0, 0, 1), 5: (4, 4, 4, 2, 2)}


@pytest.mark.long
class TestInterleaved(OverThreads):
    """Ranks that lie across the hosts, whose first is not the lowest index; a share for as many as the smallest has."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (1, 0, 0, 1, 0)}


@pytest.mark.long
class TestThreeHosts(OverThreads):
    """More than two, where sums cross by shards; two shares, and the last host has three ranks."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {7: (0, 1, 2, 2, 0, 2, 1)}


@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestSharedMemory(OverThreads):
    """Shared memory within the hosts; one rank of each crosses."""

    shares = 1
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (0, 0, 1, 1, 0)}

    def local(self) -> Transport:
        return ShmTransport()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestSharedMemoryByShares(TestSharedMemory):
    """The same, where every rank crosses that can."""

    shares = 0
