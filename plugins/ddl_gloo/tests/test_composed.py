"""The conformance kit on Gloo between hosts and shared memory within hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
from ddl_gloo.transport import GlooTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing import ComposedSuite


class OverGloo(ComposedSuite):
    def cross(self) -> Transport:
        return GlooTransport()

    def local(self) -> Transport:
        if sys.platform != "linux":
            pytest.skip("shm is for Linux")
        from ddl_shm.transport import ShmTransport

        return ShmTransport()


class TestTwoHosts(OverGloo):
    """Two hosts with equally many ranks, of which each reduces a share."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {4: (0, 0, 1, 1)}


@pytest.mark.long
class TestThreeHosts(OverGloo):
    """Three hosts, with interleaved ranks and uneven sizes."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (0, 1, 2, 0, 1)}
