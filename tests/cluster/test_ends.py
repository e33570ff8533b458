"""Nothing of a test cluster outlives it, however it ends; and two at once do not meet."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.tiers import long
from tools.test_cluster import Host, TestCluster
from tools.test_cluster.holding import PREFIX, locked_directory, remove_stale

pytestmark = pytest.mark.processes
NewCluster = Callable[..., TestCluster]
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 40.0


def of_cluster(directory: Path) -> dict[int, str]:
    """Processes whose command names the test cluster's directory: holders, doors and each sshd."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in command:
                found[int(entry.name)] = command
    return found


def namespaces(pids: Iterable[int]) -> set[str]:
    """The network namespaces that they are in, ours excepted."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def everyone() -> list[int]:
    """All processes of this machine: other test clusters may be up."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def interfaces() -> set[str]:
    """Network interfaces of this machine itself."""
    return set(os.listdir("/sys/class/net"))


def until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def owner(new_cluster: NewCluster) -> Iterator[subprocess.Popen[str]]:
    """A process with a test cluster of its own; it skips as ``new_cluster`` does, and what it leaves would be seen."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("owner.py"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def started(owner: subprocess.Popen[str]) -> Path:
    """The directory of its test cluster, which is up then."""
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_a_bed_that_is_left_is_gone(new_cluster: NewCluster) -> None:
    """Namespaces, interfaces, processes and files are what they were, with a job still running on both hosts."""
    before = interfaces()
    with new_cluster(2) as cluster:
        sleeper = cluster.popen("server1", ["ssh", "server2", "sleep 60"])
        assert until(lambda: any("sleep 60" in command for command in cluster.processes("server2").values()))
        own = namespaces(of_cluster(cluster.directory))
        assert len(own) == 3  # two hosts and the switch
    assert sleeper.returncode is not None
    assert until(lambda: not own & namespaces(everyone())) and interfaces() == before
    assert of_cluster(cluster.directory) == {} and not cluster.directory.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *long(signal.SIGTERM, signal.SIGINT)], ids=lambda number: number.name
)
def test_the_death_of_the_owner_ends_its_bed(owner: subprocess.Popen[str], number: signal.Signals) -> None:
    """By the kernel's doing alone: no other test cluster has to come and clear away."""
    directory = started(owner)
    own = namespaces(of_cluster(directory))
    assert len(own) == 3
    owner.send_signal(number)
    owner.wait(PATIENCE_S)
    assert until(lambda: not of_cluster(directory) and not directory.exists()), of_cluster(directory)
    assert until(lambda: not own & namespaces(everyone()))


@pytest.mark.long
def test_what_a_killed_switch_leaves_the_next_bed_removes(
    owner: subprocess.Popen[str], new_cluster: NewCluster
) -> None:
    """Only directories can be left, and only those of dead owners are touched."""
    mine = new_cluster(1)
    directory = started(owner)
    switch = next(pid for pid, command in of_cluster(directory).items() if " switch " in command)
    os.kill(switch, signal.SIGKILL)
    owner.kill()
    owner.wait(PATIENCE_S)
    assert until(lambda: not of_cluster(directory)) and directory.exists()
    new_cluster(1)
    assert not directory.exists() and mine.directory.exists()
    assert mine.run("server1", ["hostname"]).stdout == "server1\n"


def test_only_directories_of_dead_owners_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner holds a lock while it lives. Other temporary directories stay, whatever is in them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, other = tmp_path / f"{PREFIX}dead", tmp_path / "ddl-other"
    for directory in (dead, other):
        directory.mkdir()
        (directory / "key").touch()
    living, lock = locked_directory()
    (living / "key").touch()
    remove_stale()
    assert set(tmp_path.iterdir()) == {living, other} and (living / "key").exists() and (other / "key").exists()
    os.close(lock)
    remove_stale()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.long
def test_two_beds_at_once_do_not_meet(new_cluster: NewCluster) -> None:
    """The same names and addresses lead to each test cluster's own hosts; a power cut in one is none in the other."""
    first, second = new_cluster(2), new_cluster(2)
    assert first.address("server2") == second.address("server2")
    first.kill_host("server2")
    assert first.run("server1", ["ping", "-c1", "-W1", "server2"]).returncode == 1
    assert second.run("server1", ["ping", "-c1", "-W1", "server2"]).returncode == 0
    first.close()
    assert second.run("server1", ["ssh", "server2", "hostname"]).stdout == "server2\n"


def test_a_bed_that_cannot_come_up_leaves_nothing(
    new_cluster: NewCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is in the error: here a path that is not there to be replaced."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other test clusters may come and go meanwhile
    with pytest.raises(RuntimeError, match=re.escape("server2 did not come up: test cluster: ")):
        new_cluster([Host(), Host(binds={"/no/such/path": "/etc/hosts"})])
    assert list(tmp_path.glob(f"{PREFIX}*")) == []
