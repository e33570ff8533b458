"""The command by which each MPI starts agents, and real jobs with it: output, exit code and summary are as with ssh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ddl_mpi import launcher
from ddl_mpi.launcher import MpiLauncher
from ddl_mpi.library import MpiLibrary

from ddlcore.contracts.launcher import AgentPlace, StartPlan
from ddlcore.errors import PluginError

PROGRAM = Path(__file__).parent / "programs" / "launched.py"
SETTINGS: Mapping[str, str | int | float | bool] = {"launcher_args": "-verbose", "ssh_port": 0, "ssh_identity_file": ""}


def plan(*hosts: str, environ: Mapping[str, str] | None = None, **settings: str | int) -> StartPlan:
    agents = tuple(AgentPlace(index, host, (index,)) for index, host in enumerate(hosts))
    return StartPlan(agents, ("python", "agent"), ("public",), "/work", environ or {}, {**SETTINGS, **settings})


@pytest.fixture(params=["mpich", "openmpi"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the MPI that the test pretends to find."""
    library = MpiLibrary(request.param, "/opt/lib/libmpi.so", "1.0", "/opt/bin/mpiexec")
    monkeypatch.setattr(launcher, "find_library", lambda: library)
    return library.name


def test_one_command_with_an_agent_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command starts an agent per rank.

    With hosts in that MPI's syntax, the user's arguments, and without the key.
    """
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (command,) = MpiLauncher().commands(plan("a", "a", "b"))
    flag, number = {"mpich": ("-hosts", "PMI_RANK"), "openmpi": ("--host", "OMPI_COMM_WORLD_RANK")}[name]
    assert command.argv[:5] == ("/opt/bin/mpiexec", flag, "a:2,b:1", "-np", "3")
    assert command.argv[-3:] == ("-verbose", "python", "agent")
    assert command.agents == (0, 1, 2)
    assert command.number[0] == number
    assert command.task == "environment"
    assert "PMI_FD" in command.descriptors
    assert "--allow-run-as-root" not in command.argv


def test_root_is_told_to_open_mpi(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Open MPI is told that running as root is intended, because it refuses otherwise; a log line says so."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with caplog.at_level("INFO", "ddl"):
        (command,) = MpiLauncher().commands(plan("a"))
    assert ("--allow-run-as-root" in command.argv) == (name == "openmpi")
    assert ("--allow-run-as-root" in caplog.text) == (name == "openmpi")


def test_a_key_whose_path_has_a_space_is_refused(name: str) -> None:
    """An SSH key whose path has a space is refused, because MPI would split the path."""
    with pytest.raises(ValueError, match=r"^--ssh-identity-file /my keys/id: "):
        MpiLauncher().commands(plan("a", "b", ssh_identity_file="/my keys/id"))


def test_ssh_options_reach_its_ssh(name: str) -> None:
    """Port and key reach MPI's ssh, by a variable or an argument."""
    (command,) = MpiLauncher().commands(plan("a", "b", ssh_port=2222, ssh_identity_file="/k"))
    told = {"mpich": command.environ.get("HYDRA_LAUNCHER_EXTRA_ARGS"), "openmpi": " ".join(command.argv)}[name]
    assert told is not None and "-p 2222 -i /k" in told


@pytest.mark.parametrize(
    ("hosts", "listed", "by_srun"),
    [
        (("n1", "n1", "n2", "n2"), "pmi2", True),
        (("n1", "n1", "n2"), "pmi2", False),  # srun places equally many ranks on each node
        (("n2", "n1"), "pmi2", False),  # and it uses its own order of nodes
        (("n1", "n2"), "pmix none", False),
    ],
)
def test_srun_where_it_serves(name: str, hosts: tuple[str, ...], listed: str, by_srun: bool, tmp_path: Path) -> None:
    """srun is used within an allocation, for MPICH, if it supports PMI-2; mpiexec in all other cases."""
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\necho MPI plugin types are...; echo {listed}\n")
    srun.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": path}
    (command,) = MpiLauncher().commands(plan(*hosts, environ=environ))
    assert (command.argv[0] == "srun") == (by_srun and name == "mpich")
    if command.argv[0] == "srun":
        assert {"--mpi=pmi2", "--ntasks=4", "--ntasks-per-node=2", "--nodelist=n1,n2"} <= set(command.argv)


def test_without_mpi_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MPI, one line says what to install."""

    def find() -> MpiLibrary:
        raise PluginError("mpi4py finds no MPI library; pip install 'ddl-mpi[mpich]'")

    monkeypatch.setattr(launcher, "find_library", find)
    with pytest.raises(ValueError, match=r"--backend mpi: .*; pip install 'ddl-mpi\[mpich\]'"):
        MpiLauncher().commands(plan("a"))


def test_a_command_that_fails_is_explained() -> None:
    """A failed command is explained by its last line that is not only drawing."""
    text = "=====\n=   BAD TERMINATION\n=====\n"
    assert MpiLauncher().explain("a", 1, text) == "a: mpiexec ended with code 1: =   BAD TERMINATION"


# --- real jobs


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "--backend", "mpi", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=220, stdin=subprocess.DEVNULL)


@pytest.mark.processes
def test_ranks_are_mpis_own() -> None:
    """The ranks are MPI's, the output is marked with them, and the route is MPI."""
    done = run("python", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2, MPI's {rank} of 2, sum 2, route mpi (asked for)\n" in done.stdout, (
            done.stdout
        )


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("how", "code", "words"), [("exit", 3, "exited with code 3"), ("kill", 137, "signal 9")])
def test_the_end_is_told_as_over_ssh(how: str, code: int, words: str) -> None:
    """The summary gives the first rank that failed, its exit code, and what happened to the others, as with ssh."""
    done = run("python", str(PROGRAM), how)
    assert done.returncode == code, done.stderr
    assert re.search(rf"^ddl run: rank 1 on \S+ failed first: it .*{words}", done.stderr, re.MULTILINE), done.stderr
    assert "[0] lost (1,)" in done.stdout


@pytest.mark.processes
def test_a_dry_run_shows_the_command_and_no_key() -> None:
    """A dry run shows the command with that MPI's own mpiexec, without the job's key."""
    done = run("--dry-run", "python", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  \S*(mpiexec|mpirun)\S* ", done.stdout, re.MULTILINE), done.stdout
    assert not re.search(r"client_secret|[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\"", done.stdout)
