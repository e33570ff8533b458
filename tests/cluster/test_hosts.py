"""The hosts of a test cluster reach each other by name and by ssh, are apart otherwise, and differ as they were asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.test_cluster import Host, TestCluster

pytestmark = pytest.mark.processes
NewCluster = Callable[..., TestCluster]


def test_hosts_have_names_and_reach_each_other_by_ssh(cluster: TestCluster) -> None:
    """Each name leads to the host that calls itself so, in both directions."""
    for there, back in (("server1", "server2"), ("server2", "server1")):
        assert cluster.run(there, ["ssh", back, "hostname"]).stdout == f"{back}\n"


@pytest.mark.parametrize("family", [4, 6])
def test_addresses_of_both_families_lead_there(cluster: TestCluster, family: int) -> None:
    """ssh to an address needs no question answered: known_hosts has it."""
    answer = cluster.run("server1", ["ssh", cluster.address("server2", family), "hostname"])
    assert answer.stdout == "server2\n", answer.stderr


def test_a_login_is_bare(cluster: TestCluster) -> None:
    """What this user's shells do here at their start is not done there."""
    there = cluster.run("server1", ["ssh", "server2", "wc -c ~/.bashrc; env"])
    assert "SSH_CONNECTION=" in there.stdout
    assert "0 /" in there.stdout or "No such file" in there.stderr


def test_names_resolve_to_the_addresses(new_cluster: NewCluster) -> None:
    """A test cluster of IPv6 alone has nothing else in its hosts file."""
    six = new_cluster(families=(6,))
    assert six.run("server2", ["getent", "ahosts", "server1"]).stdout.split()[0] == six.address("server1", 6)


def test_hosts_share_neither_processes_nor_shared_memory(cluster: TestCluster) -> None:
    """A pid and a file in /dev/shm of one are not on the other; files elsewhere are."""
    with cluster.popen("server1", ["sh", "-c", "echo $$; touch /dev/shm/mine; exec sleep 60"]) as sleeper:
        assert sleeper.stdout is not None
        pid = int(sleeper.stdout.readline())
        assert cluster.processes("server1") == {pid: "sleep 60"}
        assert cluster.segments("server1") == ["mine"]
        assert (cluster.processes("server2"), cluster.segments("server2")) == ({}, [])
        assert cluster.leftovers("server1", patience_s=0.0) == [f"process {pid} (sleep 60)", "/dev/shm/mine"]
        cluster.kill("server1", pid, signal.SIGKILL)
    assert sleeper.returncode == -signal.SIGKILL
    assert not Path("/dev/shm/mine").exists()


def test_the_exit_status_comes_back(cluster: TestCluster) -> None:
    """A number as a number, a signal as a signal, a program that is not there in one line."""
    assert cluster.run("server1", ["sh", "-c", "exit 7"]).returncode == 7
    assert cluster.run("server1", ["sh", "-c", "kill -TERM $$"]).returncode == -signal.SIGTERM
    absent = cluster.run("server1", ["no-such-program"])
    assert absent.returncode == 127 and "no-such-program on server1" in absent.stderr
    with pytest.raises(RuntimeError, match=r"on server1 ended with 3: said"):
        cluster.run("server1", ["sh", "-c", "echo said; exit 3"], check=True)


def test_signals_go_through_once(cluster: TestCluster) -> None:
    """What is sent to the process that ``popen`` gives reaches the command, even where the whole group gets it."""
    script = "import signal, sys\nsignal.signal(2, lambda *_: print('heard', flush=True))\nprint('up', flush=True)\nsys.stdin.read()"
    with cluster.popen(
        "server2", [sys.executable, "-c", script], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "heard\n"
        assert process.communicate("", timeout=40)[0] == ""


def test_the_environment_is_ours_and_more(cluster: TestCluster, tmp_path: Path) -> None:
    """What is given is added; the directory is the one that was asked for; an agent of ours is not there."""
    shown = cluster.run("server1", ["sh", "-c", "echo $MORE $SSH_AUTH_SOCK; pwd"], env={"MORE": "yes"}, cwd=tmp_path)
    assert shown.stdout == f"yes\n{tmp_path}\n"


def test_a_refused_key_and_a_closed_door_fail_at_once(new_cluster: NewCluster) -> None:
    """ssh says which of both it is, and asks nothing."""
    cluster = new_cluster([Host(), Host(accepts_key=False), Host(sshd=False)])
    refused, closed = (cluster.run("server1", ["ssh", name, "true"]) for name in ("server2", "server3"))
    assert refused.returncode == 255 and "Permission denied" in refused.stderr
    assert closed.returncode == 255 and "Connection refused" in closed.stderr


def test_another_port_and_a_key_that_must_be_named(new_cluster: NewCluster) -> None:
    """``-p`` and ``-i`` are needed, and enough; a user's own configuration does as well."""
    cluster = new_cluster([Host(), Host(ssh_port=2222)], offer_key=False)
    assert cluster.run("server1", ["ssh", "server2", "true"]).returncode == 255
    named = cluster.run("server1", ["ssh", "-p", "2222", "-i", str(cluster.identity), "server2", "hostname"])
    assert named.stdout == "server2\n", named.stderr
    configured = new_cluster([Host(), Host(ssh_port=2222)], ssh_config="Host other\n HostName server2\n Port 2222\n")
    assert configured.run("server1", ["ssh", "other", "hostname"]).stdout == "server2\n"


def test_a_file_of_one_host_may_be_another(new_cluster: NewCluster, tmp_path: Path) -> None:
    """That is how a host gets another Python, another version, or lacks a script."""
    everywhere, there = tmp_path / "everywhere", tmp_path / "there"
    everywhere.write_text("same")
    there.write_text("other")
    cluster = new_cluster([Host(), Host(binds={str(everywhere): str(there)})])
    assert [cluster.run(name, ["cat", everywhere]).stdout for name in cluster.names] == ["same", "other"]


def test_two_networks_are_two(new_cluster: NewCluster) -> None:
    """Each interface has an address of its own, and one cable can be out while the other is in."""
    cluster = new_cluster(networks=2)
    cluster.link("server2", up=False, network=0)
    first, second = (cluster.address("server2", 4, network) for network in (0, 1))
    assert cluster.run("server1", ["ping", "-c1", "-W1", first]).returncode == 1
    assert cluster.run("server1", ["ping", "-c1", "-W1", second]).returncode == 0


def test_a_deadline_ends_the_command(cluster: TestCluster) -> None:
    """Nothing of it is left on the host."""
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run("server1", ["sleep", "60"], timeout_s=0.2)
    assert cluster.leftovers("server1") == []


@pytest.mark.long
def test_a_power_cut_is_silent(cluster: TestCluster) -> None:
    """Everything on the host is gone, and a connection to it hears nothing at all: no reset, no end."""
    with cluster.popen("server1", ["ssh", "server2", "echo up; exec sleep 60"]) as ssh:
        assert ssh.stdout is not None and ssh.stdout.readline() == "up\n"
        cluster.kill_host("server2")
        with pytest.raises(subprocess.TimeoutExpired):
            ssh.wait(1.0)
        begun_s = time.monotonic()
        assert cluster.run("server1", ["ping", "-c1", "-W1", cluster.address("server2")]).returncode == 1
        assert time.monotonic() - begun_s > 0.5
        ssh.kill()


LISTENS = """
import socket, sys

def silent(call):
    try:
        return f"heard {call()!r}"
    except TimeoutError:
        return "silence"
    except OSError as error:
        return f"heard {error}"

there = (sys.argv[1], 22)
line = socket.create_connection(there, timeout=40)
line.recv(100)  # the greeting of sshd
print("up", flush=True)
sys.stdin.readline()
line.settimeout(0.3)
print(silent(lambda: line.recv(1)))
print(silent(lambda: socket.create_connection(there, timeout=0.3)))
"""


def test_nothing_is_heard_of_a_host_without_power(cluster: TestCluster) -> None:
    """An open connection has neither an end nor a reset, and a new one is not refused. What ran there has ended."""
    address = cluster.address("server2")
    listens = [sys.executable, "-I", "-S", "-c", LISTENS, address]
    sleeps = cluster.popen("server2", ["sleep", "600"])
    with cluster.popen("server1", listens, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        cluster.kill_host("server2")
        assert sleeps.wait(40) != 0
        assert process.communicate("now\n", timeout=40)[0] == "silence\nsilence\n"
