"""tools/run_test_cluster.py runs what it is told across its hosts, and says in one line why where it cannot.

docs/test-cluster.md names it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


# --- the tool's own part, with hosts that do not exist


@dataclass
class FakeProcess:
    """A process that has written these lines and ends with ``returncode``."""

    stdout: list[str]
    returncode: int

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> int:
        return self.returncode


@dataclass
class FakeCluster:
    """Stands in for the class TestCluster and its object, and keeps what is started on the hosts."""

    lines: Sequence[str] = ()
    returncode: int = 0
    names: list[str] = field(default_factory=list)
    rate_mbit: float = 0.0
    started: list[tuple[str, list[str]]] = field(default_factory=list)
    streams: dict[str, Any] = field(default_factory=dict)
    is_up: bool = False

    def __call__(self, hosts: int, rate_mbit: float) -> FakeCluster:
        self.names, self.rate_mbit = [f"server{i + 1}" for i in range(hosts)], rate_mbit
        return self

    def __enter__(self) -> FakeCluster:
        self.is_up = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_up = False

    def popen(self, name: str, argv: Sequence[str], **more: Any) -> FakeProcess:
        assert self.is_up
        self.started.append((name, list(argv)))
        self.streams = {key: more[key] for key in more.keys() & {"stdin", "stdout", "stderr"}}
        return FakeProcess(list(self.lines), self.returncode)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """The test cluster that the tool brings up."""
    cluster = FakeCluster()
    monkeypatch.setattr(run_test_cluster, "TestCluster", cluster)
    return cluster


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 1)])
def test_the_exit_code_is_that_of_ddl_run(
    returncode: int, code: int, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """-np and -H are filled in, and the output comes as it is."""
    fake.lines, fake.returncode = ["one\n", "two\n"], returncode
    words = ["run", "--hosts", "3", "--slots", "2", "--rate", "50", "--", "--backend", "gloo", "sh", "-c", "x -- y"]
    assert run_test_cluster.main(words) == code
    command = [
        "ddl",
        "run",
        "-np",
        "6",
        "-H",
        "server1:2,server2:2,server3:2",
        "--backend",
        "gloo",
        "sh",
        "-c",
        "x -- y",
    ]
    assert fake.started == [("server1", command)]
    assert (fake.rate_mbit, fake.is_up) == (50.0, False)
    told = capsys.readouterr()
    assert told.out.splitlines()[1:] == ["one", "two"]
    assert told.err == ("" if returncode == 0 else f"test cluster: ddl ended with {returncode}\n")


def test_the_table_has_a_row_for_each_rank(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that says nothing makes the exit code 1."""
    rows = [[rank, f"server{rank + 1}", 0, 1, rank, 2] for rank in (0, 1)]
    said = [f"[{row[0]}] {json.dumps(dict(zip(run_test_cluster.COLUMNS, row)))}\n" for row in rows]
    fake.lines = ["a warning\n", *said]
    assert run_test_cluster.main(["--hosts", "2", "--slots", "1"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1:] == [list(run_test_cluster.COLUMNS), *([str(cell) for cell in row] for row in rows)]
    fake.lines = said[:1]
    assert run_test_cluster.main(["--hosts", "2", "--slots", "1"]) == 1


def test_the_shell_has_the_terminal(fake: FakeCluster) -> None:
    """It runs on server1, and its exit code is the tool's."""
    fake.returncode = 5
    assert run_test_cluster.main(["shell", "--hosts", "2"]) == 5
    ((host, command),) = fake.started
    assert (host, command[0]) == ("server1", "bash")
    assert fake.streams == {"stdin": None, "stdout": None, "stderr": None}, "all three are those of this process"


@pytest.mark.parametrize(("words", "measured", "code"), [([], 4, 4), ([], 0, 1), (["--no-numbers"], 4, 1)])
def test_the_demo_measures_after_the_digits(
    words: list[str], measured: int, code: int, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digits that are not learnt fail it, whatever is measured."""
    seen: list[bool] = []

    def numbers(asked: object) -> int:
        seen.append(fake.is_up)
        return measured

    monkeypatch.setattr(run_test_cluster, "numbers", numbers)
    assert run_test_cluster.main(["demo", *words]) == code
    assert seen == ([] if words else [False]), "the benchmark brings up its own hosts"
