"""Planted faults on hosts that are network namespaces: a slow link, a small /dev/shm and another ddl, in one report."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.starting import DDL, ROOT
from tools.test_cluster import Host, TestCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.timeout(360),
    pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed"),
]


def test_three_faults(new_cluster: Callable[..., TestCluster], tmp_path: Path) -> None:
    """Each is named with its host and its fix, exit code 1; the host of another version is left out, the rest is measured."""
    version = tmp_path / "version.py"
    version.write_text((ROOT / "ddlcore" / "version.py").read_text().replace('VERSION = "', 'VERSION = "9.'))
    cluster = new_cluster(
        [Host(), Host(), Host(binds={str(ROOT / "ddlcore" / "version.py"): str(version)})], rate_mbit=100
    )
    small = cluster.run("server2", ["mount", "-o", "remount,size=64m", "/dev/shm"])
    assert small.returncode == 0, small.stderr
    done = cluster.run(
        "server1", [*DDL, "doctor", "-H", "server1:1,server2:1,server3:1", "--json", "--model-mb", "200"], cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    found = {one["check"]: one for one in report["findings"]}
    assert sorted(found) == ["dev-shm", "hosts", "links"]
    assert found["hosts"]["where"] == "server3" and "ddlcore 9." in found["hosts"]["what"]
    assert " on server3; or share one environment" in found["hosts"]["fix"]
    assert found["dev-shm"]["where"] == "server2" and "holds 64 MiB" in found["dev-shm"]["what"]
    # On a busy machine, a rank may get no core while a link is measured: then its latency is a further finding.
    slow = [one for one in report["findings"] if "Gbit/s between" in one["what"]]
    assert len(slow) == 1 and slow[0]["check"] == "links", report["findings"]
    assert re.match(r"0\.\d+ Gbit/s between server1 and server2 by gloo, below 10", slow[0]["what"])
    assert "200 MB of gradients" in slow[0]["means"] and "--network-interface" in slow[0]["fix"]
    rate = next(one for one in report["matrices"] if one["title"] == "gloo: bandwidth between ranks")
    assert 0.006 < rate["values"][0][1] < 0.0145  # 100 Mbit/s are 0.0125 GB/s; a burst goes beyond
    assert next(one for one in report["checks"] if one["check"] == "clocks")["state"] == "ok"
    assert all(cluster.leftovers(name) == [] for name in cluster.names)


def test_one_host_with_a_slow_cable(new_cluster: Callable[..., TestCluster], tmp_path: Path) -> None:
    """Its links are compared with the one that is good: the host is named, and the picture has all hosts."""
    cluster = new_cluster([Host(), Host(), Host()], rate_mbit=400)
    cluster.rate(20, ["server3"])
    command = [*DDL, "doctor", "-H", "server1:1,server2:1,server3:1", "--json", "--plot", "links.svg"]
    done = cluster.run("server1", command, cwd=tmp_path, timeout_s=180.0)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (found,) = [one for one in report["findings"] if "times less than" in one["what"]]
    assert found["where"] == "server3" and found["what"].endswith("more of 6 links, all of them from or to server3")
    assert "ethtool DEVICE" in found["fix"]
    assert report["matrices"][0]["hosts"] == ["server1", "server2", "server3"]
    assert (tmp_path / "links.svg").stat().st_size > 5000
