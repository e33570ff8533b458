"""The coordinator in rank 0's process stays as long as other ranks need it or may still come, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddlcore.control.client import connect_with
from ddlcore.control.embedded_server import EmbeddedServer
from ddlcore.messages.to_coordinator import Arrive, Bye, Done
from ddlcore.messages.to_rank import Arrivals
from tests.control.echo import PATIENCE_S, EchoCoordinator, greet

NAME = "ddl-test.rendezvous"


def server_of(size: int, stays_s: float) -> EmbeddedServer:
    return EmbeddedServer(size, EchoCoordinator(), "", time.monotonic() + stays_s)


def waiting(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when ``server`` first asks which ranks still need it."""
    looked, needing = threading.Event(), server._needing

    def look() -> frozenset[int]:
        looked.set()
        return needing()

    monkeypatch.setattr(server, "_needing", look)
    return looked


def take_part(server: EmbeddedServer, rank: int, before_it_leaves: Callable[[], object] = lambda: None) -> None:
    """Arrive as ``rank``, which is a world by itself, train, and leave."""
    channel, store = connect_with(server.invitation.access, rank)
    try:
        channel.send(Arrive(f"process {rank}", (rank,), "here", "another kin", 100 + rank))
        assert isinstance(channel.receive(PATIENCE_S)[0], Arrivals)
        assert greet(channel, rank)
        before_it_leaves()
        channel.send(Bye("", False))
        channel.receive(PATIENCE_S)
        channel.send(Done())
    finally:
        channel.close()
        store.close()


def test_it_stays_for_a_rank_that_comes_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 has ended its script; rank 1 has not called init yet, and trains without it then."""
    server = server_of(2, PATIENCE_S)
    server.publish([tmp_path], NAME, PATIENCE_S)
    looked = waiting(server, monkeypatch)
    steps: list[str] = []

    def train() -> None:
        looked.clear()
        if looked.wait(PATIENCE_S):  # a look at rank 1 while it trains
            steps.append("trained")

    def come() -> None:
        if looked.wait(PATIENCE_S):
            steps.append("came")
            take_part(server, 1, train)

    late = threading.Thread(target=come)
    late.start()
    server.close("ended its script", patient=True)
    steps.append("closed")
    looked.set()
    late.join(PATIENCE_S)
    assert steps == ["came", "trained", "closed"]
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_stay_longer_than_others_may_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who has not called init before the deadline would be told that it is late; the file that invites it is removed."""
    server = server_of(2, 0.3)
    looked = waiting(server, monkeypatch)
    server.publish([tmp_path], NAME, PATIENCE_S)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    begun_s = time.monotonic()
    server.close("ended its script", patient=True)
    assert looked.is_set() and time.monotonic() >= server._deadline_s
    assert time.monotonic() - begun_s < PATIENCE_S
    assert list(tmp_path.iterdir()) == []


def test_it_stays_for_nobody_if_rank_0_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others hear of the end at once, and the file is gone."""
    server = server_of(2, PATIENCE_S)
    looked = waiting(server, monkeypatch)
    server.publish([tmp_path], NAME, PATIENCE_S)
    channel, store = connect_with(server.invitation.access, 1)
    try:
        channel.send(Arrive("process 1", (0, 1), "here", "another kin", 101))
        until_s = time.monotonic() + PATIENCE_S
        while 1 not in server._registration.active and time.monotonic() < until_s:
            time.sleep(0.001)
        server.close("raised KeyError", patient=False)
        (lost,) = channel.receive(PATIENCE_S)
        assert "raised KeyError, before init was complete" in str(lost)
    finally:
        channel.close()
        store.close()
    assert not looked.is_set() and list(tmp_path.iterdir()) == []
