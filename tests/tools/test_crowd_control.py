"""Two hundred and fifty-six clients of one server, over its real sockets, in one process."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from tools.crowd_control import STEPS, Crowd

CLIENTS, TENSORS = 256, 400


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
def test_256_clients_enter_decide_and_leave(address: str) -> None:
    """All see the same tensors in the same order in few messages; nothing is dropped, and nothing stays open."""
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    reports: list[str] = []
    crowd = Crowd(CLIENTS, TENSORS, address, reports.append)
    try:
        for step in STEPS:
            crowd.play(step)
    finally:
        crowd.close()
    assert not reports
    assert crowd.server.dropped == 0
    order = crowd.clients[0].ran
    assert len(set(order)) == TENSORS
    assert all(client.ran == order for client in crowd.clients)
    assert sum(client.messages for client in crowd.clients) < CLIENTS * 100, "answers of one turn are joined"
    assert threading.active_count() == threads
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == files
