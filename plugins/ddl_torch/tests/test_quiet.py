"""A replayed step of the digits example sends nothing to the coordinator and waits for nothing from it.

Two independent counts show it: ``ddl.stats()`` and the kernel. Within a host, ranks reach the launcher through Unix
sockets, for which the kernel counts no bytes. So the job's control network is put on TCP, as across hosts, where
TCP_INFO tells for every connection how many bytes went each way. A rank has two kinds of connections: one to the
coordinator and, after its transport has been opened, idle ones to the store. All carry ZeroMQ's heartbeats: an
encrypted ping each way every few seconds, and its answer. So whatever steps send shows as a difference between the two
kinds.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from plugins.ddl_torch.tests.launching import EXAMPLES, PROGRAMS, launch

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.alone,  # a rank that gets no core for a second leaves replay, as it should
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and Linux's struct tcp_info"),
]

STEPS = 50
BEAT_BYTES = 200  # the most bytes of a heartbeat each way: ping and pong, encrypted and framed


@pytest.fixture(scope="module")
def found() -> dict[bool, list[dict[str, Any]]]:
    """Return what each of two ranks saw in the fifty steps, with and without replay; both jobs run at once."""
    with ThreadPoolExecutor() as pool:
        return dict(zip((True, False), pool.map(measured, (True, False))))


def measured(replay: bool) -> list[dict[str, Any]]:
    env = {"DDL_REPLAY": str(int(replay)), "DDL_CONTROL_ADDRESS": "tcp://127.0.0.1:0"}
    shown = launch(2, PROGRAMS / "quiet.py", str(EXAMPLES / "torch_digits.py"), env=env)
    print(shown)
    ranks = [json.loads(line) for line in re.findall(r"found (\{.*\})", shown)]
    assert len(ranks) == 2
    assert all(len(rank["wires"]) >= 2 for rank in ranks), "one to the coordinator, and idle ones to the store"
    return ranks


def test_steady_steps_send_nothing_by_both_counts(found: dict[bool, list[dict[str, Any]]]) -> None:
    """50 steps send 0 messages, and the coordinator's connection carries no more bytes than an idle one."""
    for rank in found[True]:
        assert rank["messages"] == 0
        assert rank["negotiated"] == 0
        assert rank["replayed"] >= STEPS
        beats = int(rank["seconds"]) + 2
        for way in (0, 1):
            growths = [wire[way] for wire in rank["wires"]]
            assert max(growths) <= beats * BEAT_BYTES
            assert max(growths) - min(growths) <= 2 * BEAT_BYTES, "one beat fell into the time on one wire only"


def test_negotiated_steps_show_in_both_counts(found: dict[bool, list[dict[str, Any]]]) -> None:
    """Without replay, the same steps show in both counts, so the counts are able to detect messages."""
    for rank in found[False]:
        assert rank["messages"] >= 2 * STEPS
        assert rank["negotiated"] >= STEPS
        assert rank["replayed"] == 0
        for way in (0, 1):
            growths = sorted(wire[way] for wire in rank["wires"])
            assert growths[-1] >= STEPS * 50, "a message a step, each way, on the coordinator's wire"
            assert growths[0] <= (int(rank["seconds"]) + 2) * BEAT_BYTES, "none on an idle one"
