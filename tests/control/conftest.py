"""Networks that tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.echo import WIRES, Net

__all__: list[str] = []


@pytest.fixture(params=list(WIRES))
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A network of two ranks, on every wire in turn."""
    network = Net(request.param)
    yield network
    network.close()


@pytest.fixture(params=["ipc", "tcp"])
def served(request: pytest.FixtureRequest) -> Iterator[Net]:
    """The same, only where a server stands behind it."""
    network = Net(request.param)
    yield network
    network.close()
