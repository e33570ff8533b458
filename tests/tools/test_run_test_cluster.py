"""tools/run_test_cluster.py runs what it is told across its hosts, and says in one line why where it cannot.

docs/test-cluster.md names it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_test_cluster
from tools.test_cluster import cluster as cluster_module
from tools.test_cluster import possible

ROOT = Path(__file__).resolve().parents[2]
processes = pytest.mark.processes


@pytest.fixture
def here(new_cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where there can be no test cluster; this tree's ddl, before any that is installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.long
@processes
def test_where_every_rank_is(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """A table with a row a rank, hosts in the order of their names, over ssh."""
    assert run_test_cluster.main(["--hosts", "2", "--slots", "1"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert rows[0][1:4] == ["ddl", "run", "-np"] and "server1:1,server2:1" in rows[0]
    assert rows[1] == list(run_test_cluster.COLUMNS)
    assert rows[2:] == [["0", "server1", "0", "1", "0", "2"], ["1", "server2", "0", "1", "1", "2"]]


@pytest.mark.long
@processes
def test_a_command_of_ones_own(here: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Its output comes as it is; the exit code is that of ddl run."""
    words = ["run", "--hosts", "2", "--slots", "1", "--", "sh", "-c", "hostname; exit 3"]
    assert run_test_cluster.main(words) == 3
    told = capfd.readouterr()
    assert "server1" in told.out and "test cluster: ddl ended with 3" in told.err


@pytest.mark.long
@processes
def test_a_shell_is_on_server1(here: None) -> None:
    """What it is told it does there, and it ends as the last command did."""
    command = [sys.executable, "tools/run_test_cluster.py", "shell", "--hosts", "2"]
    told = "hostname; ssh server2 hostname; exit 5\n"
    done = subprocess.run(command, cwd=ROOT, input=told, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[1:] == ["server1", "server2"], done.stderr
    assert done.returncode == 5


def test_nothing_to_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As is a number of hosts that is none."""
    for wrong in (["run"], ["--hosts", "0"], ["walk"]):
        with pytest.raises(SystemExit) as ended:
            run_test_cluster.options(wrong)
        assert ended.value.code == 2
    assert "run what?" in capsys.readouterr().err


def test_where_there_can_be_none_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2."""
    monkeypatch.setattr(cluster_module, "why_no_cluster", lambda: "a test cluster needs root")
    assert run_test_cluster.main([]) == 2
    assert capsys.readouterr().err == "test cluster: a test cluster needs root\n"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the packages that bring it; without root and sudo, that."""
    ask = possible.why_no_cluster.__wrapped__
    monkeypatch.setattr(possible, "in_sbin", lambda name: None if name in ("sshd", "ip", "tc") else f"/sbin/{name}")
    assert ask() == "a test cluster needs iproute2, openssh-server: apt-get install iproute2 openssh-server"
    monkeypatch.setattr(possible, "in_sbin", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(possible, "as_root", lambda: None)
    assert "needs root" in ask()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in ask()
