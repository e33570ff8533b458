"""``ddl bench -H``: ranks on several hosts, as ``ddl run`` takes them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ddl_conform.world import run_world

from ddlcore.commands.cli import main
from ddlcore.config.loading import Settings
from ddlcore.launch.job.placement import Placed
from ddlcore.plug.registry import Registry
from ddlcore.process.job import Job
from tests.launch.standin import STAND_IN_WORKS, install_ssh
from tests.launch.starting import DDL, Ddl
from tools.test_cluster import TestCluster

REFUSED = 2
ONE_ROW = ("--ops", "allreduce", "--sizes", "4", "--rounds", "2", "--json", "t.json")
NEEDS_GLOO = pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed")


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    return install_ssh(tmp_path / "bin")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-H", "h1:1"), "-H h1:1: a collective needs at least 2 ranks"),
        (("-H", "h1"), "say how many ranks h1 takes, such as h1:4"),
        (("-np", "3", "-H", "h1:1,h2:1"), "-np 3: too few slots, -H h1:1,h2:1 takes 2 ranks"),
        (("--hostfile", "nowhere"), "--hostfile nowhere: No such file or directory"),
        (("-H", "h1:1,h2:1", "--hostfile", "hosts"), "-H and --hostfile both say where; give one of them"),
        (("-H", "h1:1,h2:1", "--backend", "shm"), "shm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(ddl: Ddl, arguments: tuple[str, ...], text: str) -> None:
    """One line, exit code 2, nothing started."""
    done = ddl("bench", *arguments)
    assert done.returncode == REFUSED, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@STAND_IN_WORKS
@pytest.mark.processes
def test_a_host_that_cannot_be_reached(ddl: Ddl, ssh: dict[str, str]) -> None:
    """It is named with the reason, and nothing is measured."""
    done = ddl("bench", "-H", "localhost:1,down:1", *ONE_ROW, env=ssh)
    assert done.returncode == REFUSED
    assert done.stderr == "ddl bench: nothing was started: down: no route leads to it\n"
    assert done.stdout == ""


@NEEDS_GLOO
@pytest.mark.parametrize("hosts", ["h1:1,localhost:1", "h1:1,h2:1"], ids=["rank 0 elsewhere", "all ranks elsewhere"])
def test_results_of_ranks_elsewhere_are_shown(
    hosts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first rank of this host tells them as they come. If there is none, rank 0 returns them. Ranks are threads."""
    returned: list[list[Any]] = []

    def run_placed(
        placed: Placed,
        settings: Settings,
        registry: Registry,
        environ: Mapping[str, str],
        call: tuple[Callable[..., Any], Sequence[Any], None],
    ) -> list[Any]:
        function, arguments, _ = call

        def body(rank: int, job: Job) -> Any:
            return function(*arguments)

        returned.extend(run_world(placed.layout.size, body))
        return returned

    monkeypatch.setattr("ddlcore.launch.job.function.run_placed", run_placed)
    path = tmp_path / "t.json"
    assert main(["bench", "-H", hosts, "--ops", "allreduce", "--sizes", "4", "--rounds", "2", "--json", str(path)]) == 0
    told = capsys.readouterr()
    elsewhere = "localhost" not in hosts
    assert ("the results are shown at the end" in told.err) == elsewhere
    assert [len(one) for one in returned] == [3 if elsewhere else 0, 0]
    assert told.out.splitlines()[1] == "allreduce, 2 ranks on 2 hosts, float32"
    found = json.loads(path.read_text())
    assert (found["ranks"], found["hosts"]) == (2, [name.partition(":")[0] for name in hosts.split(",")])
    (row,) = found["rows"]
    assert [len(times) for times in row["times_s"].values()] == [2, 2]


@pytest.mark.long
@NEEDS_GLOO
@STAND_IN_WORKS
@pytest.mark.processes
@pytest.mark.parametrize("hosts", ["h1:1,localhost:1", "h1:1,h2:1"], ids=["rank 0 elsewhere", "all ranks elsewhere"])
def test_results_come_back(hosts: str, ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """Whichever rank runs here; if none does, the results are shown at the end."""
    done = ddl("bench", "-H", hosts, *ONE_ROW, env=ssh)
    assert done.returncode == 0, done.stderr
    assert ("the results are shown at the end" in done.stderr) == ("localhost" not in hosts)
    assert done.stdout.splitlines()[1] == "allreduce, 2 ranks on 2 hosts, float32"
    found = json.loads((tmp_path / "t.json").read_text())
    assert (found["ranks"], found["hosts"]) == (2, [name.partition(":")[0] for name in hosts.split(",")])
    assert [len(times) for times in found["rows"][0]["times_s"].values()] == [2, 2]


@pytest.mark.long
@NEEDS_GLOO
@pytest.mark.processes
@pytest.mark.timeout(360)
def test_on_a_cluster(new_cluster: Callable[..., TestCluster], tmp_path: Path) -> None:
    """Over ssh, with a host file; the link's rate bounds what is measured."""
    (tmp_path / "hosts").write_text("server1 slots=1\nserver2 slots=1\n")
    cluster = new_cluster(2, rate_mbit=100)
    command = [*DDL, "bench", "--hostfile", "hosts", "--ops", "allreduce", "--sizes", "4,1M", "--rounds", "2"]
    done = cluster.run("server1", [*command, "--json", "t.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "allreduce, 2 ranks on 2 hosts, float32" in done.stdout
    small, large = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert min(small["times_s"]["transport"]) < 0.02
    assert min(large["times_s"]["transport"]) > 0.02  # 1 MiB at 100 Mbit/s take 84 ms; a burst goes beyond
    assert [cluster.leftovers(name) for name in cluster.names] == [[], []]
