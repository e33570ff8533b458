"""The network of a test cluster carries what its rate says, and nothing while a cable is out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.test_cluster import TestCluster
from tools.test_cluster.network import Network
from tools.test_cluster.possible import in_sbin

pytestmark = pytest.mark.processes
NewCluster = Callable[..., TestCluster]
POUR = Path(__file__).with_name("pour.py")


def poured(cluster: TestCluster, sender: str, receiver: str, family: int = 4, seconds: float = 0.6) -> float:
    """Mbit/s of payload over one connection."""
    with cluster.popen(receiver, [sys.executable, POUR, "receive"]) as receiving:
        assert receiving.stdout is not None and receiving.stdout.readline() == "listening\n"
        cluster.run(sender, [sys.executable, POUR, "send", cluster.address(receiver, family), str(seconds)], check=True)
        return float(receiving.communicate(timeout=80)[0])


@pytest.mark.long
@pytest.mark.parametrize("mbit", [100, 1000])
@pytest.mark.parametrize("family", [4, 6])
def test_the_rate_is_what_was_asked_for(new_cluster: NewCluster, mbit: int, family: int) -> None:
    """One connection carries 80 to 105 % of it, headers included, in either family."""
    cluster = new_cluster(rate_mbit=mbit)
    assert 0.80 * mbit < poured(cluster, "server1", "server2", family) < 1.05 * mbit


@pytest.mark.long
def test_a_rate_holds_for_one_host_in_both_directions(new_cluster: NewCluster) -> None:
    """What a slow host sends and what it receives is slow; the others are as fast as before."""
    cluster = new_cluster(3, rate_mbit=500)
    cluster.rate(50, ["server2"])
    for sender, receiver, mbit in (
        ("server2", "server1", 50),
        ("server1", "server2", 50),
        ("server1", "server3", 500),
    ):
        assert 0.8 * mbit < poured(cluster, sender, receiver) < 1.05 * mbit, (sender, receiver)


def limits(cluster: TestCluster, name: str) -> list[str]:
    """Return the rates that the kernel keeps for what a host sends on eth0; [] without a limit."""
    shown = cluster.run(name, [in_sbin("tc") or "tc", "qdisc", "show", "dev", "eth0"], check=True).stdout
    return re.findall(r"^qdisc tbf .* rate (\S+)", shown, re.MULTILINE)


def test_no_host_is_faster_than_its_rate(cluster: TestCluster) -> None:
    """The kernel limits what a host sends, and the switch limits what it receives. Other hosts have no limit."""
    cluster.rate(50, ["server2"])
    assert (limits(cluster, "server1"), limits(cluster, "server2")) == ([], ["50Mbit"])
    # Within a short time, the first burst counts. Without a limit there would be thousands.
    assert poured(cluster, "server1", "server2", seconds=0.3) < 2 * 50
    cluster.rate(None)
    assert limits(cluster, "server2") == []


@pytest.mark.parametrize("mbit", [50, 1000.0])
def test_a_rate_is_set_at_both_ends_of_a_cable(mbit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two programs are told, without a cluster. The switch's end is named after the host and the network."""
    told: list[tuple[str, str, str]] = []
    monkeypatch.setattr(Network, "_batch", lambda self, where, tool, lines: told.append((where, tool, *lines)))
    network = Network([], {}, 2)
    network.limit("server2", mbit, 1)
    network.limit("server2", None, 1)
    ends = [("server2", "dev eth1"), ("switch", "dev server2.1")]
    assert [(where, tool) for where, tool, _ in told] == [(where, "tc") for where, _ in ends] * 2
    for (_, _, line), (_, device) in zip(told, ends):
        found = re.fullmatch(rf"qdisc replace {device} root tbf rate (\d+)bit burst (\d+) limit (\d+)", line)
        assert found is not None, line
        rate, burst, limit = map(int, found.groups())
        assert rate == mbit * 1e6 and limit > burst >= rate / 8 / 1000, "a burst of a millisecond fits"
    assert [line for _, _, line in told[2:]] == [f"qdisc replace {device} root noqueue" for _, device in ends]


def test_without_a_rate_the_network_is_fast(cluster: TestCluster) -> None:
    """And a limit can be taken away again."""
    cluster.rate(20)
    cluster.rate(None)
    assert poured(cluster, "server1", "server2") > 200


@pytest.mark.long
@pytest.mark.parametrize("family", [4, 6])
def test_a_cable_can_be_pulled_and_put_back(cluster: TestCluster, family: int) -> None:
    """While it is out nothing arrives; a connection outlives it."""
    ping = ["ping", "-c1", "-W1", cluster.address("server2", family)]
    with cluster.popen("server1", ["ssh", "server2", "cat"], stdin=subprocess.PIPE) as cat:
        assert cat.stdin is not None and cat.stdout is not None
        cat.stdin.write("before\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == "before\n"
        cluster.link("server2", up=False)
        assert cluster.run("server1", ping).returncode == 1
        cluster.link("server2", up=True)
        assert cluster.run("server1", ping).returncode == 0
        assert cat.communicate("after\n", timeout=80)[0] == "after\n"
