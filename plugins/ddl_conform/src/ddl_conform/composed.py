"""The suite for a transport across hosts, which is tested as a part of a hierarchical transport.

A subclass chooses the layouts: which rank is on which host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ddl_shm.hierarchical.transport import HierarchicalTransport

from ddl_conform.threads import ThreadsTransport
from ddl_conform.transports import TransportSuite
from ddlcore.contracts.transport import Transport

__all__ = ["ComposedSuite"]


class ComposedSuite(TransportSuite):
    """The suite that tests the transport across hosts in a hierarchical transport.

    A subclass overrides ``cross`` and sets ``layouts``.
    """

    __test__ = False  # only subclasses are tests
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {}  # world size -> the host of each rank
    shares: ClassVar[int] = 0  # how many ranks of each host use the cross-host transport; 0: all that a host has
    chunk_bytes = 64 << 10  # small, so that large tensors take many rounds

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = bool(cls.layouts)
        cls.sizes = tuple(cls.layouts)

    def cross(self) -> Transport:
        """Return a new instance of the transport to test, for one rank. The instance is not opened yet."""
        raise NotImplementedError(f"{type(self).__name__}.cross() must return the transport to test")

    def local(self) -> Transport:
        """Return a new transport for one rank, which connects it with the ranks of its host; by default ``threads``."""
        return ThreadsTransport()

    def make(self, size: int) -> Sequence[Transport]:
        return [HierarchicalTransport(self.local(), self.cross) for _ in range(size)]

    def settings(self) -> Mapping[str, str | int | float | bool]:
        given = {"hierarchical_chunk_bytes": self.chunk_bytes, "hierarchical_shares": self.shares}
        return {**super().settings(), **given}

    def hosts(self, size: int) -> Sequence[int]:
        return self.layouts[size]
