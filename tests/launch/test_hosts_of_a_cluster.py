"""Jobs over real ssh on hosts that are network namespaces: who is who, what is refused, and what a fault leaves: nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.starting import DDL, ROOT
from tools.test_cluster import Host, TestCluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]
NewCluster = Callable[..., TestCluster]
NEEDS_GLOO = pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed")
TWO = "server1:2,server2:2"
LOOP = """
import os, sys, time, numpy, ddlcore as ddl
ddl.init()
ddl.barrier()
open(f"up.{ddl.rank()}", "w").write(str(os.getpid()))
try:
    while True:
        ddl.allreduce(numpy.ones(1000), name="x")
        time.sleep(0.01)
except ddl.PeerLost as error:
    open(f"lost.{ddl.rank()}", "w").write(f"{time.time()} {error.ranks} {error}")
    raise
"""


def ddl(
    cluster: TestCluster, *arguments: str, where: Path, host: str = "server1", **more: Any
) -> subprocess.CompletedProcess[str]:
    return cluster.run(host, [*DDL, *arguments], cwd=where, **more)


def test_ranks_of_two_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    """Rank, local rank, host, directory, and one meeting point that each can reach."""
    code = (
        "import json, os, socket; e = os.environ; "
        "json.dump([socket.gethostname(), os.getcwd(), dict(e)], open(e['RANK'], 'w'))"
    )
    done = ddl(cluster, "run", "-H", TWO, "python", "-c", code, where=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [name for name, _, _ in seen] == ["server1", "server1", "server2", "server2"]
    assert {directory for _, directory, _ in seen} == {str(tmp_path)}
    assert [e["LOCAL_RANK"] for _, _, e in seen] == ["0", "1", "0", "1"]
    addresses = [e["DDL_ADDRESS"] for _, _, e in seen]
    assert addresses[0] in (cluster.address("server1", 4), cluster.address("server1", 6))
    assert addresses[2] in (cluster.address("server2", 4), cluster.address("server2", 6))
    assert {e["MASTER_ADDR"] for _, _, e in seen} == {addresses[0]}
    assert all(cluster.leftovers(name) == [] for name in cluster.names)


@pytest.mark.long
@pytest.mark.parametrize("family", [4, 6])
def test_addresses_of_either_family(family: int, new_cluster: NewCluster, tmp_path: Path) -> None:
    """A test cluster that has one family alone, hosts named by address: the launcher's own is recognised."""
    cluster = new_cluster(families=(family,))
    names = [cluster.address(name) for name in cluster.names]
    hosts = ",".join(f"[{name}]:1" if family == 6 else f"{name}:1" for name in names)
    done = ddl(cluster, "run", "-H", hosts, "sh", "-c", "echo $(hostname) $DDL_ADDRESS $MASTER_ADDR", where=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] server{rank + 1} {names[rank]} {names[0]}" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.long
def test_a_launcher_on_neither_host(new_cluster: NewCluster, tmp_path: Path) -> None:
    """From a third machine; rank 0 is elsewhere, and the port where ranks meet is free there."""
    cluster = new_cluster(3)
    done = ddl(
        cluster, "run", "-H", "server1:1,server2:1", "sh", "-c", "echo $MASTER_ADDR", where=tmp_path, host="server3"
    )
    assert done.returncode == 0, done.stderr
    assert {line[4:] for line in done.stdout.splitlines()} <= {
        cluster.address("server1", 4),
        cluster.address("server1", 6),
    }


@pytest.mark.long
def test_a_chosen_interface(new_cluster: NewCluster, tmp_path: Path) -> None:
    """--network-interface: ranks and control network are on the second network, though ssh goes over the first."""
    cluster = new_cluster(networks=2)
    show = "echo $DDL_ADDRESS; ss -Htn state established 2>/dev/null | grep -c . >/dev/null"
    done = ddl(cluster, "run", "-H", TWO, "--network-interface", "eth1", "sh", "-c", show, where=tmp_path)
    found = {line[4:] for line in done.stdout.splitlines()}
    second = [{cluster.address(name, family, 1) for family in (4, 6)} for name in cluster.names]
    assert len(found) == 2 and all(found & addresses for addresses in second), done.stderr


@pytest.mark.long
def test_port_and_key_of_ssh(new_cluster: NewCluster, tmp_path: Path) -> None:
    """--ssh-port and --ssh-identity-file reach ssh; without them the host is named, with what to do."""
    cluster = new_cluster([Host(), Host(ssh_port=2222)], offer_key=False)
    flags = ["--ssh-port", "2222", "--ssh-identity-file", str(cluster.identity)]
    assert ddl(cluster, "run", "-H", TWO, *flags, "true", where=tmp_path).returncode == 0
    done = ddl(cluster, "run", "-H", TWO, *flags[:2], "true", where=tmp_path)
    assert done.returncode == 2
    assert "server2: it does not accept our key" in done.stderr


@pytest.mark.long
def test_a_name_of_ssh_alone(new_cluster: NewCluster, tmp_path: Path) -> None:
    """A nickname from ssh's configuration that no resolver knows."""
    cluster = new_cluster(ssh_config="Host big\n HostName server2\n")
    done = ddl(cluster, "run", "-H", "server1:1,big:1", "hostname", where=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] server1", "[1] server2"], done.stderr


@pytest.mark.long
def test_what_is_wrong_with_hosts(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Refused key, nothing listening, no such host, no Python there, no script there: a row each, in one go."""
    for name in ("empty", "empty/bin"):
        (tmp_path / name).mkdir()
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    other = tmp_path / "other"
    other.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    (here / "train.py").write_text("open('started', 'w')")
    cluster = new_cluster(
        [Host(), Host(accepts_key=False), Host(sshd=False), Host(binds={str(here): str(other)}), Host()]
    )
    hosts = ",".join(f"{name}:1" for name in [*cluster.names, "server99"])
    done = ddl(cluster, "run", "-H", hosts, "python", "train.py", where=here)
    assert done.returncode == 2
    rows = {line.split()[2]: line for line in done.stderr.splitlines() if re.match(r"ddl run: server\d+ ", line)}
    expected = {
        "server2": "does not accept our key",
        "server3": "nothing listens for ssh there",
        "server4": f"train.py: no such file (looked in {here})",
        "server5": "ok",
        "server99": "no such host",
    }
    assert {name: words in rows[name] for name, words in expected.items()} == dict.fromkeys(expected, True), done.stderr
    assert done.stderr.splitlines()[-1].startswith("ddl run: nothing was started: server2, server3, server4, server99")
    assert not (here / "started").exists()


@pytest.mark.long
def test_another_python_and_another_ddl(new_cluster: NewCluster, tmp_path: Path) -> None:
    """What stands at the interpreter's path there is another version; a ddlcore of another version; none at all."""
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\necho 'Python 3.1 runs there and another here' >&2; exit 1\n")
    wrong.chmod(0o755)
    version = tmp_path / "version.py"
    version.write_text((ROOT / "ddlcore" / "version.py").read_text().replace('VERSION = "', 'VERSION = "9.'))
    cluster = new_cluster(
        [
            Host(),
            Host(binds={sys.executable: str(wrong)}),
            Host(binds={str(ROOT / "ddlcore" / "version.py"): str(version)}),
            Host(binds={sys.executable: "/dev/null"}),
        ]
    )
    done = ddl(cluster, "run", "-H", "server1:1,server2:1,server3:1,server4:1", "true", where=tmp_path)
    assert done.returncode == 2
    assert re.search(r"server2 .*Python 3\.1 runs there", done.stderr)
    assert re.search(r"server3 .*ddlcore 9\.\S+ is installed there and \d", done.stderr)
    assert re.search(r"server4 .*there is no .*python to run", done.stderr)
    assert "Traceback" not in done.stderr


# --- faults, in the middle of a job


def begin(
    cluster: TestCluster, *arguments: str, where: Path, ranks: int, host: str = "server1"
) -> subprocess.Popen[str]:
    """A job whose ranks are all up, and reduce."""
    process = cluster.popen(host, [*DDL, "run", *arguments], cwd=where)
    deadline_s = time.monotonic() + 240
    while len([path for path in where.glob("up.*") if path.read_text()]) < ranks:
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(process.communicate()[1])
        time.sleep(0.02)
    return process


def losses(where: Path, since_s: float) -> dict[int, tuple[float, str]]:
    """By rank: how long after ``since_s`` it was told of a loss, and of whose."""
    found = {}
    for path in where.glob("lost.*"):
        at, _, text = path.read_text().partition(" ")
        found[int(path.suffix[1:])] = (float(at) - since_s, text)
    return found


def clean(cluster: TestCluster) -> None:
    """Nothing is left on any host, after what a grace period and its end take."""
    left = {name: cluster.leftovers(name, patience_s=32.0) for name in cluster.names}
    assert left == {name: [] for name in cluster.names}


@pytest.mark.long
@NEEDS_GLOO
def test_a_rank_killed_on_another_host(cluster: TestCluster, tmp_path: Path) -> None:
    """PeerLost on all others soon; exit code, host and summary are right; nothing stays on either host."""
    process = begin(cluster, "-H", TWO, "--grace-s", "3", "python", "-c", LOOP, where=tmp_path, ranks=4)
    killed_s = time.time()
    cluster.kill("server2", int((tmp_path / "up.3").read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=160)
    assert process.returncode == 137, err
    lost = losses(tmp_path, killed_s)
    assert sorted(lost) == [0, 1, 2]
    assert max(after_s for after_s, _ in lost.values()) < 20.0
    assert all("(3,)" in text for _, text in lost.values())
    assert "rank 3 on server2 failed first: it was killed by signal 9" in err
    clean(cluster)


@pytest.mark.long
@NEEDS_GLOO
@pytest.mark.parametrize("how", ["link", "power"])
def test_a_host_that_falls_silent(how: str, cluster: TestCluster, tmp_path: Path) -> None:
    """A cable that is pulled, or a power cut: no packet says so. The others know soon."""
    process = begin(cluster, "-H", TWO, "--grace-s", "3", "python", "-c", LOOP, where=tmp_path, ranks=4)
    gone_s = time.time()
    if how == "link":
        cluster.link("server2", up=False)
    else:
        cluster.kill_host("server2")
    _, err = process.communicate(timeout=160)
    assert process.returncode == 255, err
    lost = losses(tmp_path, gone_s)
    assert {0, 1} <= set(lost)
    assert all(lost[rank][0] < 20.0 and "(2, 3)" in lost[rank][1].replace("(2,)", "(2, 3)") for rank in (0, 1)), lost
    assert re.search(r"rank [23] on server2 failed first: it was lost after [0-9.]+ s: its host server2 is gone", err)
    if how == "link":
        clean(cluster)
    else:
        assert cluster.leftovers("server1", patience_s=32.0) == []


@pytest.mark.long
@NEEDS_GLOO
def test_agent_and_sshd_killed(cluster: TestCluster, tmp_path: Path) -> None:
    """The connection ends at once; what the agent had started goes with it."""
    process = begin(cluster, "-H", TWO, "--grace-s", "3", "python", "-c", LOOP, where=tmp_path, ranks=4)
    killed_s = time.time()
    found = cluster.processes("server2").items()
    doomed = [pid for pid, command in found if "ddlcore.launch.agents.agent" in command or command.startswith("sshd: ")]
    cluster.run("server2", ["kill", "-KILL", *map(str, doomed)], check=True)  # all at once: one's end ends others
    _, err = process.communicate(timeout=160)
    assert process.returncode == 255, err
    lost = losses(tmp_path, killed_s)
    assert {0, 1} <= set(lost)
    assert max(lost[rank][0] for rank in (0, 1)) < 20.0
    clean(cluster)


@pytest.mark.long
@NEEDS_GLOO
def test_the_launcher_killed(cluster: TestCluster, tmp_path: Path) -> None:
    """kill -9 of `ddl run`: every rank on every host ends, and so do the agents."""
    process = begin(cluster, "-H", TWO, "python", "-c", LOOP, where=tmp_path, ranks=4)
    launcher = next(pid for pid, command in cluster.processes("server1").items() if "-m ddlcore.launch run" in command)
    cluster.kill("server1", launcher, signal.SIGKILL)
    process.communicate(timeout=80)
    clean(cluster)


@pytest.mark.long
@NEEDS_GLOO
def test_ctrl_c(cluster: TestCluster, tmp_path: Path) -> None:
    """Every rank gets it."""
    process = begin(cluster, "-H", TWO, "python", "-c", LOOP, where=tmp_path, ranks=4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (1, 130)
    assert "interrupted: the ranks were asked to stop" in err
    clean(cluster)


def test_a_function_on_two_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    """``ddlcore.run(fn, hosts=…)``, results in rank order."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, ddlcore\n"
        "def f(x):\n"
        "    return x, int(os.environ['RANK']), socket.gethostname()\n"
        f"print(ddlcore.run(f, (7,), hosts='{TWO}'))\n"
    )
    done = cluster.run("server1", [sys.executable, script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(7, rank, f"server{1 + rank // 2}") for rank in range(4)])
    clean(cluster)


# --- scripts of other libraries, unchanged

FOREIGN = ROOT / "examples" / "foreign"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchs_own_data_parallel_across_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    """By MASTER_ADDR and its kin; parameters end alike on all four ranks."""
    done = ddl(cluster, "run", "-H", TWO, "python", str(FOREIGN / "torch_ddp.py"), where=tmp_path, timeout_s=400)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"\[(\d)\] rank \1 of 4: parameters (\w+)", done.stdout)
    assert sorted(rank for rank, _ in ends) == ["0", "1", "2", "3"]
    assert len({digest for _, digest in ends}) == 1
    clean(cluster)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_tensorflows_own_workers_across_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    """By TF_CONFIG: worker i at its host's address and a port that is free there."""
    command = ["python", str(FOREIGN / "tf_multiworker.py"), "--steps", "20"]
    done = ddl(cluster, "run", "-H", "server1:1,server2:1", *command, where=tmp_path, timeout_s=440)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"\[[01]\] worker ([01]) of 2: test accuracy [\d.]+, sum ([\d.]+)$", done.stdout, re.MULTILINE)
    assert sorted(worker for worker, _ in ends) == ["0", "1"], done.stdout
    assert len({weights for _, weights in ends}) == 1
    clean(cluster)
