"""The conformance kit on Gloo across hosts with shared memory within them."""

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
        from ddlcore.builtin.shm.transport import ShmTransport

        return ShmTransport()


class TestTwoHosts(OverGloo):
    """Side by side, by shares."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {4: (0, 0, 1, 1)}


class TestThreeHosts(OverGloo):
    """In turn, and uneven."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {5: (0, 1, 2, 0, 1)}
