"""Chaos on hosts that are network namespaces: ranks are killed at random moments, and the host of the launcher is lost.

When it is lost, a successor serves on another host, which is then lost, too. The result must be that of one process that
nothing has disturbed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.chaos import plan
from tests.faults.chaos_of_hosts import HostChaos, NewCluster, agents_on, ranks_on, stormy

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed"),
]


@pytest.mark.long
def test_ranks_and_the_host_of_the_launcher(new_cluster: NewCluster, tmp_path: Path) -> None:
    chaos = HostChaos(new_cluster(4), tmp_path, 400, 1, 200.0)
    chaos.await_all()
    chaos.kill_some(3)
    chaos.await_all()
    chaos.cut("server1")
    chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
    chaos.await_all()
    chaos.kill_some(3)
    chaos.end()


@pytest.mark.long
def test_an_agent_that_comes_late_to_a_successor(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Its news of an old world, in which the lost host would decide, do not end the training of the ranks that are left.

    The first two ranks were alone for a moment, and then trained with the third one. One of them is on the lost host. The
    agent of the third one is stopped, so the second rank has registered with the successor before that agent comes.
    """
    chaos = HostChaos(new_cluster(3), tmp_path, 400, 0, 200.0)
    cluster = chaos.cluster
    chaos.await_all()
    cluster.kill("server3", ranks_on(cluster, "server3")[0], signal.SIGKILL)
    chaos.until(lambda: "world 3: rank 2 on server3 is back" in chaos.text(), "the third rank comes back")
    assert "world 2: rank 2 on server3 died (SIGKILL); 2 ranks go on" in chaos.text()
    chaos.await_all()
    agents = agents_on(cluster, "server3")
    for agent in agents:
        cluster.kill("server3", agent, signal.SIGSTOP)
    chaos.cut("server1")
    chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
    time.sleep(3.0)  # the rank on its host has registered; if not, this test sees less
    for agent in agents:
        cluster.kill("server3", agent, signal.SIGCONT)
    chaos.end()
    assert "ranks 2" in chaos.text()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_hundred_faults(new_cluster: NewCluster, tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """A hundred kills, and two hosts with the launcher and its successor: while all train, and amid a recovery."""
    with plan(request, seed, tmp_path):
        chaos = HostChaos(new_cluster(5), tmp_path, 3000, seed, 1700.0)
        chaos.await_all()
        chaos.kill_some(33)
        chaos.await_all()
        chaos.cut("server1")
        chaos.until(lambda: chaos.serves_on("server2"), "a successor serves")
        chaos.kill_some(33)
        chaos.await_all()
        chaos.cut("server2")
        chaos.until(lambda: chaos.serves_on("server3"), "another successor serves")
        chaos.kill_some(34)
        chaos.end()
        assert chaos.done >= 102  # the last kill may have been one of two
        worlds = chaos.text().count("ddl run: world ")
        print(f"seed {seed}: 100 kills, 2 hosts with the launcher, {worlds} changes of world, all right")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_storm(new_cluster: NewCluster, tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """Hosts hang, are cut off in one direction or both, and come back; the launcher's host is lost. The state is large."""
    with plan(request, seed, tmp_path):
        more = {"STATE_BYTES": str(64 << 20)}
        stormy(HostChaos(new_cluster(6), tmp_path, 3000, seed, 1700.0, variables=more), seed, 40, 10)
