"""`ddl run --dashboard` and `ddlcore.run(dashboard=…)`: what a real job tells its live page, and how that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddlcore
from tests.launch.starting import DDL, Ddl
from tools.test_cluster import TestCluster

pytestmark = pytest.mark.processes

# Rank 0 of the job reads the page of its own job when the steps are known, and prints what it was told.
READS = """
import json, sys, time, urllib.request
import numpy as np
import ddlcore as ddl
ddl.init()
def read():
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/stream", timeout=30) as answer:
        return json.loads(answer.readline()[6:])["now"]
for step in range(int(sys.argv[2])):
    ddl.allreduce(np.ones(100_000, np.float32), name="gradient")
    time.sleep(0.01)
if ddl.rank() == 0:
    print("told", json.dumps(read()), flush=True)
ddl.barrier()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free, most likely still when it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    yield number
    with contextlib.closing(socket.socket()) as after:
        assert after.connect_ex(("127.0.0.1", number)) != 0, "the page outlives its job"


def told(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if "told {" in line)
    found: dict[str, Any] = json.loads(line.partition("told ")[2])
    return found


@pytest.mark.long
def test_a_job_on_this_host(ddl: Ddl, tmp_path: Path, port: int) -> None:
    """Its address is printed first; the page knows command, ranks, steps, bytes and memory."""
    (tmp_path / "train.py").write_text(READS)
    done = ddl("run", "-np", "2", "--dashboard", str(port), "train.py", str(port), "400")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"ddl run: live page: http://127.0.0.1:{port}/"
    now = told(done.stdout)
    assert now["title"].endswith(f"train.py {port} 400")
    assert (now["size"], now["hosts"], now["over"]) == (2, 1, None)
    assert [rank["state"] for rank in now["ranks"]] == ["running", "running"]
    assert now["summary"]["steps"] > 50
    assert now["summary"]["steps_per_s"] > 1
    assert all(rank["memory"] > 1 << 20 and rank["cpu"] > 0 for rank in now["ranks"])
    assert [(link["kind"], link["name"]) for link in now["links"]] == [("tensors", "shm")]
    assert now["links"][0]["sent_bytes"] > 2 * 50 * 400_000
    assert any("run them from memory" in event["text"] for event in now["events"])


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed")
def test_a_job_on_two_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    """Each host's interface is a link beside the tensors, and the bytes between the hosts have gone over it."""
    (tmp_path / "train.py").write_text(READS)
    command = [*DDL, "run", "-H", "server1:1,server2:1", "--dashboard", "8480", "train.py", "8480", "400"]
    done = cluster.run("server1", command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    now = told(done.stdout)
    links = {(link["host"], link["kind"]): link for link in now["links"]}
    assert set(links) == {(host, kind) for host in ("server1", "server2") for kind in ("tensors", "interface")}
    for host in ("server1", "server2"):
        moved = links[host, "tensors"]["sent_bytes"]
        assert 50 * 400_000 < moved < 2 * links[host, "interface"]["sent_bytes"] + 10_000_000
    assert all(cluster.leftovers(name) == [] for name in cluster.names)


def test_a_port_that_is_taken(ddl: Ddl) -> None:
    """One line, and nothing was started."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        number = listening.getsockname()[1]
        done = ddl("run", "-np", "2", "--dashboard", str(number), "echo", "started")
    assert (done.returncode, done.stdout) == (2, "")
    expected = rf"ddl run: --dashboard 127\.0\.0\.1:{number}: the port is taken; .*\n"
    assert re.fullmatch(expected, done.stderr)


@pytest.mark.long
def test_two_jobs_at_once(ddl: Ddl, tmp_path: Path) -> None:
    """The second takes the next port; here it is started by a rank of the first."""
    inner = " ".join([*DDL, "run", "-np", "1", "--dashboard", "true"])
    done = ddl("run", "-np", "1", "--dashboard", "sh", "-c", f"{inner} 2>&1")
    assert done.returncode == 0, done.stderr
    ports = re.findall(r"live page: http://127\.0\.0\.1:(\d+)/", done.stderr + done.stdout)
    assert len(set(ports)) == 2


@pytest.mark.long
def test_a_job_that_does_not_use_ddl(ddl: Ddl) -> None:
    """The page is served all the same, and ends with it."""
    done = ddl("run", "-np", "2", "--dashboard", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def _where(number: int) -> int:
    import urllib.request

    ddlcore.init()
    with urllib.request.urlopen(f"http://127.0.0.1:{number}/stream", timeout=30) as answer:
        size: int = json.loads(answer.readline()[6:])["now"]["size"]
    ddlcore.barrier()
    ddlcore.shutdown()
    return size


@pytest.mark.long
def test_from_python(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is served while the call blocks."""
    assert ddlcore.run(_where, (port,), num_proc=2, dashboard=port) == [2, 2]
    assert f"ddlcore.run: live page: http://127.0.0.1:{port}/" in capsys.readouterr().err


@pytest.mark.parametrize("dashboard", ["nowhere", 66000])
def test_a_bad_place_from_python(dashboard: str | int) -> None:
    with pytest.raises(ddlcore.DdlInternalError, match=rf"run: --dashboard {dashboard}: "):
        ddlcore.run(_where, (0,), num_proc=2, dashboard=dashboard)
