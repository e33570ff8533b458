"""The transport suite for what is composed of a local and a cross-host transport, however ranks lie on hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ddlcore.builtin.hierarchical.transport import HierarchicalTransport
from ddlcore.builtin.threads import ThreadsTransport
from ddlcore.contracts.transport import Transport
from ddlcore.testing.transports import TransportSuite

__all__ = ["ComposedSuite"]


class ComposedSuite(TransportSuite):
    """Holds a transport that spans hosts to what composing asks of it. To write: ``cross`` and ``layouts``.

    All ranks are threads of the test's process, which only pretend to be on several hosts.

    >>> class TestMineAcross(ComposedSuite):
    ...     layouts = {3: (0, 0, 1), 4: (0, 1, 0, 1)}
    ...     def cross(self):
    ...         return MyTransport()
    """

    __test__ = False  # a subclass is a test
    layouts: ClassVar[Mapping[int, Sequence[int]]] = {}  # by size of the world: the host of each rank
    shares: ClassVar[int] = 0  # how many ranks of each host cross; 0: as many as each has
    chunk_bytes = 64 << 10  # little, so that what is large has many rounds

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = bool(cls.layouts)
        cls.sizes = tuple(cls.layouts)

    def cross(self) -> Transport:
        """A new transport across hosts, for one rank; not yet opened."""
        raise NotImplementedError(f"{type(self).__name__}.cross() must return the transport to test")

    def local(self) -> Transport:
        """A new transport within a host, for one rank."""
        return ThreadsTransport()

    def make(self, size: int) -> Sequence[Transport]:
        return [HierarchicalTransport(self.local(), self.cross) for _ in range(size)]

    def settings(self) -> Mapping[str, str | int | float | bool]:
        given = {"hierarchical_chunk_bytes": self.chunk_bytes, "hierarchical_shares": self.shares}
        return {**super().settings(), **given}

    def hosts(self, size: int) -> Sequence[int]:
        return self.layouts[size]
