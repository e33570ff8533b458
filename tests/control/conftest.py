"""Networks that tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.echo import PATIENCE_S, WIRES, Net

__all__: list[str] = []


@pytest.fixture
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is closed waits longer for its last words than 200 ms, which a busy machine may need for other things."""
    monkeypatch.setattr("ddlcore.control.line._FLUSH_S", PATIENCE_S)


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
