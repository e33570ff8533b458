"""The hierarchical transport passes the transport suite, however ranks lie on hosts, whatever it is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from ddlcore.builtin.hierarchical.transport import HierarchicalTransport
from ddlcore.builtin.threads import ThreadsTransport
from ddlcore.contracts.transport import Transport
from ddlcore.testing import TransportSuite

CHUNK_BYTES = 64 << 10


class HierarchicalSuite(TransportSuite):
    """Chunks that are small, so that what is large has many rounds."""

    __test__ = False
    chunk_bytes = CHUNK_BYTES
    shares: ClassVar[int] = 1
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {}  # host of each rank, by size

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = True
        cls.sizes = tuple(cls.layouts)

    def make(self, size: int) -> Sequence[Transport]:
        return [HierarchicalTransport(self.local(), ThreadsTransport) for _ in range(size)]

    def local(self) -> Transport:
        return ThreadsTransport()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        given = {"hierarchical_chunk_bytes": CHUNK_BYTES, "hierarchical_shares": self.shares}
        return {**super().settings(), **given}

    def hosts(self, size: int) -> Sequence[int]:
        return self.layouts[size]


class TestSideBySide(HierarchicalSuite):
    """As many ranks on each of two hosts, each rank with a share."""

    shares = 0
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {4: (0, 0, 1, 1)}


class TestUneven(HierarchicalSuite):
    """Hosts with fewer ranks than others, and with one alone; the first rank of each crosses."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {3: (0, 0, 1), 5: (4, 4, 4, 2, 2)}


class TestInterleaved(HierarchicalSuite):
    """Ranks that lie across the hosts, whose first is not the lowest index; a share for as many as the smallest has."""

    shares = 0
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (1, 0, 0, 1, 0)}


class TestThreeHosts(HierarchicalSuite):
    """More than two, where sums cross by shards; two shares, and the last host has three ranks."""

    shares = 2
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {7: (0, 1, 2, 2, 0, 2, 1)}


@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestSharedMemory(HierarchicalSuite):
    """Shared memory within the hosts."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (0, 0, 1, 1, 0)}

    def local(self) -> Transport:
        from ddlcore.builtin.shm.transport import ShmTransport

        return ShmTransport()


@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestSharedMemoryByShares(TestSharedMemory):
    """The same, where every rank crosses that can."""

    shares = 0
