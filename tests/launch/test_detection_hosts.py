"""Ranks that other launchers have started on two hosts: who they are, what they are told, and how a loss is noticed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.foreign import PROGRAM, Started, finish, mpich, why_no_mpich
from tests.launch.starting import environment
from tools.test_cluster import Slurm, TestCluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]
needs_gloo = pytest.mark.skipif(
    importlib.util.find_spec("ddl_gloo") is None or importlib.util.find_spec("torch") is None,
    reason="no transport across hosts that works without MPI: ddl-gloo or torch is not installed",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDL_RENDEZVOUS_DIR", str(tmp_path / "meet"))
    return tmp_path / "meet"


def begin(cluster: TestCluster, hosts: list[str], *arguments: str) -> list[subprocess.Popen[str]]:
    """One rank by hand on each of ``hosts``, in that order."""
    own = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": cluster.address("server1"), "MASTER_PORT": "29500"}
    return [
        cluster.popen(
            host,
            [sys.executable, PROGRAM, *arguments],
            env=environment({**own, "RANK": str(rank), "DDL_BACKEND": "gloo"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(hosts)
    ]


def left(cluster: TestCluster, home: Path) -> list[object]:
    """What is still there: processes and shared memory of hosts, and the file by which ranks meet."""
    return [
        *(found for name in cluster.names for found in cluster.leftovers(name)),
        *(home.iterdir() if home.exists() else ()),
    ]


@pytest.mark.long
@needs_gloo
def test_uneven_hosts_by_hand(cluster: TestCluster, home: Path) -> None:
    """Three ranks here, one there: ranks, sizes, one address for rank 0 that all are told."""
    done = finish(begin(cluster, ["server1", "server1", "server2", "server1"], "where"))
    assert done.codes == [0] * 4, done.text
    found = dict(re.findall(r"^rank (\d) of 4 (local \d of \d cross \d of \d \w+) sum 4", done.text, re.MULTILINE))
    assert found == {
        "0": "local 0 of 3 cross 0 of 2 False",
        "1": "local 1 of 3 cross 0 of 1 False",
        "2": "local 0 of 1 cross 1 of 2 False",
        "3": "local 2 of 3 cross 0 of 1 False",
    }
    assert left(cluster, home) == []


def lost(done: Started, who: int) -> dict[int, float]:
    """When each rank heard that ``who`` is lost."""
    found = re.findall(rf"^rank (\d) lost \((?:\d, )*{who},?(?: \d)*\) at ([\d.]+)", done.text, re.MULTILINE)
    return {int(rank): float(at) for rank, at in found}


@pytest.mark.long
@needs_gloo
@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_is_killed_on_one_host(cluster: TestCluster, home: Path, who: int) -> None:
    """Every other rank hears of it soon, also where it was rank 0; nothing is left on either host."""
    done = finish(begin(cluster, ["server1", "server1", "server2", "server2"], "kill", str(who)))
    ended = re.search(r"ends at ([\d.]+)", done.text)
    assert ended is not None, done.text
    heard = lost(done, who)
    assert sorted(heard) == [rank for rank in range(4) if rank != who], done.text
    assert max(heard.values()) - float(ended[1]) < 20.0
    assert done.codes == [-9 if rank == who else 7 for rank in range(4)]
    assert left(cluster, home) == []


@pytest.mark.long
@needs_gloo
@pytest.mark.parametrize("how", ["link", "host"])
def test_a_host_is_gone(cluster: TestCluster, home: Path, tmp_path: Path, how: str) -> None:
    """A cable is pulled, or the power: both sides hear of it soon, each of the other's ranks."""
    started = begin(cluster, ["server1", "server1", "server2", "server2"], "endless", "9", str(tmp_path))
    deadline_s = time.monotonic() + 200.0
    while len(list(tmp_path.glob("rank.*"))) < 4:
        assert time.monotonic() < deadline_s, "the ranks did not meet"
        time.sleep(0.05)
    gone_s = time.time()
    if how == "link":
        cluster.link("server2", up=False)
    else:
        cluster.kill_host("server2")
    done = finish(started)
    at = {int(rank): float(at) for rank, at in re.findall(r"^rank (\d) lost .* at ([\d.]+)", done.text, re.MULTILINE)}
    assert sorted(at) == ([0, 1, 2, 3] if how == "link" else [0, 1]), done.text
    assert max(at.values()) - gone_s < 20.0, done.text
    cluster_left = [
        found for name in ("server1", *(["server2"] if how == "link" else [])) for found in cluster.leftovers(name)
    ]
    assert [*cluster_left, *home.iterdir()] == []


@pytest.mark.skipif(
    why_no_mpich() != "" or importlib.util.find_spec("ddl_mpi") is None, reason="MPICH or ddl-mpi is missing"
)
def test_mpiexec_across_hosts(cluster: TestCluster, home: Path) -> None:
    """hydra's hosts are ours, and the route is MPI itself."""
    command = mpich().before[0]
    argv: list[str | Path] = [command, "-hosts", "server1:2,server2:2", "-np", "4", sys.executable, PROGRAM, "where"]
    done = cluster.run("server1", argv, env=environment({"DDL_BACKEND": "mpi"}), timeout_s=320)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, place in enumerate(["0 of 2 cross 0", "1 of 2 cross 0", "0 of 2 cross 1", "1 of 2 cross 1"]):
        assert re.search(rf"rank {rank} of 4 local {place} of 2 True sum 4 route mpi", done.stdout), done.stdout
    assert left(cluster, home) == []


# --- Slurm


def srun(slurm: Slurm, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return slurm.run(["srun", *arguments], env=environment({"OMP_NUM_THREADS": "1", **(env or {})}), timeout_s=320)


def test_tasks_of_a_step_on_one_node(slurm: Slurm, home: Path) -> None:
    """srun says who they are; of one node's the route is shared memory."""
    done = srun(slurm, "-N1", "-n2", sys.executable, str(PROGRAM), "where")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2 cross 0 of 1 True sum 2 route shm") == 2, done.stdout
    assert left(slurm.cluster, home) == []


@pytest.mark.long
@needs_gloo
def test_tasks_of_a_step_on_two_nodes(slurm: Slurm, home: Path) -> None:
    """Two here and one there."""
    done = srun(
        slurm, "-N2", "-n3", "--distribution=block", sys.executable, str(PROGRAM), "where", env={"DDL_BACKEND": "gloo"}
    )
    assert done.returncode == 0, done.stderr
    assert "rank 2 of 3 local 0 of 1 cross 1 of 2 False sum 3" in done.stdout, done.stdout
    assert left(slurm.cluster, home) == []


@pytest.mark.long
@pytest.mark.parametrize("who", ["0", "1"])
def test_a_task_is_killed(slurm: Slurm, home: Path, who: str) -> None:
    """The step ends soon, not with 0, and leaves nothing."""
    done = srun(slurm, "-N1", "-n2", sys.executable, str(PROGRAM), "kill", who)
    ended_s = time.time()
    assert done.returncode not in (0, None)
    began = re.search(r"ends at ([\d.]+)", done.stdout)
    assert began is not None, done.stdout + done.stderr
    assert ended_s - float(began[1]) < 20.0
    assert left(slurm.cluster, home) == []


BATCH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks=3 --distribution=block
{ddl} run {python} {external_rank} where
echo "ddl run: $?"
{ddl} run {python} {external_rank} raise 2
echo "ddl run, a failure: $?"
{ddl} run -np 4 {python} {external_rank} where
{ddl} run -np 1 --dry-run {python} {external_rank} where | grep '^  srun'
srun -n 2 {ddl} run {python} {external_rank} where
{python} {external_rank} where
"""


@pytest.mark.long
@needs_gloo
def test_ddl_run_in_a_batch_script(slurm: Slurm, home: Path, tmp_path: Path) -> None:
    """It finds nodes and slots by itself and starts agents by srun; what cannot work is one line."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    names = {"ddl": f"{sys.executable} -m ddlcore.launch", "python": sys.executable, "external_rank": PROGRAM}
    script.write_text(BATCH.format(**names))
    env = environment({"DDL_BACKEND": "gloo"})
    job = slurm.submit([f"--output={out}", script], cwd=tmp_path, env=env)
    assert slurm.wait(job, 100.0) == ("COMPLETED", 0), out.read_text()
    text = out.read_text()
    for rank, place in enumerate(["0 of 2 cross 0 of 2", "1 of 2 cross 0 of 1", "0 of 1 cross 1 of 2"]):
        assert re.search(rf"^\[{rank}\] rank {rank} of 3 local {place} False sum 3", text, re.MULTILINE), text
    assert "ddl run: 0\n" in text
    assert "ddl run, a failure: 1\n" in text
    assert "ddl run: rank 2 on server2 failed first: it exited with code 1" in text, text
    assert "-np 4: too few slots, the allocation that srun sees takes 3 ranks" in text
    assert re.search(r"^  srun --nodes=1 --ntasks=1 --nodelist=server1 ", text, re.MULTILINE), text
    assert "srun has started `ddl run` itself, 2 times" in text
    assert "SLURM_NTASKS=3, but this process is no task of a job step: it is a world of one" in text
    assert "rank 0 of 1 " in text
    assert [slurm.cluster.leftovers(name, patience_s=40.0) for name in slurm.cluster.names] == [[], []]
