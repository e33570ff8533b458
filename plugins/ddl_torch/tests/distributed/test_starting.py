"""Programs call ``init_process_group("ddl")`` in each of torch's ways and under several launchers, and lose a rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from plugins.ddl_torch.tests.launching import PROGRAMS, launch, together
from tests.launch import foreign

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

PROGRAM = str(PROGRAMS / "group.py")
SIZE = 2
SAID = [f"rank {rank} of {SIZE} on ddl" for rank in range(SIZE)]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_hand(*arguments: str) -> list[tuple[int, str]]:
    """Start the program once for each rank, with its rank in its arguments. Return exit codes and output, by rank."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, PROGRAM, "--size", str(SIZE), *arguments]
    return together([[*command, "--rank", str(rank)] for rank in range(SIZE)], {**env, "OMP_NUM_THREADS": "1"})


def ways(folder: Path) -> dict[str, Sequence[str]]:
    return {
        "tcp": [f"tcp://localhost:{free_port()}"],
        "file": [f"file://{folder}/meeting"],
        "store": [f"store:{folder}/store"],
        "twice": [f"file://{folder}/one", f"file://{folder}/two"],
    }


@pytest.mark.parametrize("way", ["file", "twice", pytest.param("tcp", marks=pytest.mark.long)])
def test_ranks_that_are_given_by_the_program(way: str, tmp_path: Path) -> None:
    """After destroy_process_group, the group can be made again."""
    methods = ways(tmp_path)[way]
    for rank, (code, text) in enumerate(by_hand("--method", *methods)):
        assert code == 0, text
        assert text.count(SAID[rank]) == len(methods), text


@pytest.mark.long
def test_a_store_of_the_program(tmp_path: Path) -> None:
    for rank, (code, text) in enumerate(by_hand("--method", *ways(tmp_path)["store"])):
        assert code == 0 and SAID[rank] in text, text


@pytest.mark.parametrize(
    "launcher", ["ddl run", *(pytest.param(one, marks=pytest.mark.long) for one in ("torchrun", "mpich"))]
)
def test_launchers(launcher: str) -> None:
    """The ranks are those of the launcher, and ddl is imported only because the group needs it."""
    if launcher == "ddl run":
        text = launch(SIZE, Path(PROGRAM))
    else:
        why, starter = {
            "torchrun": (foreign.why_no_torchrun, foreign.torchrun),
            "mpich": (foreign.why_no_mpich, foreign.mpich),
        }[launcher]
        if why():
            pytest.skip(why())
        words = starter().before
        command = [word.format(size=SIZE) for word in words]
        python = [sys.executable] if starter().wants_python else []
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = []
        if launcher == "mpich":  # it sets no variable that torch reads
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
            arguments = ["--method", f"tcp://localhost:{free_port()}"]
            python = [sys.executable, "-c", _RANKS_OF_MPI]
        done = subprocess.run(
            [*command, *python, PROGRAM, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
        text = done.stdout
        assert done.returncode == 0, text
    assert all(said in text for said in SAID), text
    assert text.count("ddl is imported: True") == SIZE, text


@pytest.mark.long
@pytest.mark.parametrize("way", ["tcp", "file"])
def test_ranks_that_torch_spawns(way: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "spawned.py"), *ways(tmp_path)[way]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150)
    assert done.returncode == 0 and all(said in done.stdout for said in SAID), done.stdout


@pytest.mark.long
@pytest.mark.parametrize("first", ["ddl", "torch"])
def test_ddl_and_torch_distributed_in_one_program(first: str) -> None:
    """They share one world, in which calls of both are replayed. The job ends with the group only if the group began it."""
    text = launch(SIZE, PROGRAMS / "both.py", first)
    for rank in range(SIZE):
        assert f"rank {rank} of {SIZE}: ddl goes on: {first == 'ddl'}" in text, text
    assert text.count("refused: parameters of this DistributedOptimizer") == SIZE, text


_RANKS_OF_MPI = """
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--rank", os.environ["PMI_RANK"], "--size", os.environ["PMI_SIZE"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("ends", ["killed", "another call"])
def test_the_others_raise_an_error_that_says_why(ends: str, tmp_path: Path) -> None:
    """In the middle of a training by DistributedDataParallel, in which they wait for rank 1."""
    (code, text), (_, lost) = by_hand("--method", f"file://{tmp_path}/meeting", "--ends", ends)
    assert code == 3, text
    (when,) = re.findall(rf"at ([\d.]+) {ends}", lost)
    ((raised, error),) = re.findall(r"at ([\d.]+) (\w+: .*)", text)
    if ends == "killed":
        assert "PeerLost: " in error and "rank 1" in error
        assert float(raised) - float(when) < 2.0 * float(os.environ.get("DDL_TEST_PATIENCE", "1"))
    else:
        assert "MismatchError: " in error, error


@pytest.mark.long  # about 20 s of waiting
def test_the_timeout_of_the_group_ends_a_job_of_ddl_run() -> None:
    """DistributedDataParallel waits for futures, which have no time limit. By default, ``ddl run`` has none, either.

    The timeout also limits how much later than the other rank a rank may start, so it must not be too short here.
    """
    text = launch(SIZE, Path(PROGRAM), "--ends", "sleeps", "--timeout-s", "12", check=False)
    errors = re.findall(r"at [\d.]+ (\w+: .*)", text)
    assert any("stalled for more than 12 s" in error and "not on rank 1" in error for error in errors), text


@pytest.mark.parametrize(
    "way", ["gloo", *(pytest.param(one, marks=pytest.mark.long) for one in ("none", "mesh", "mpi"))]
)
def test_scripts_for_gloo_run_unchanged_on_request(way: str) -> None:
    text = launch(SIZE, PROGRAMS / "unchanged.py", way, options=["--torch-backend", "ddl"])
    for rank in range(SIZE):
        assert f"rank {rank}: {['ddl'] * 3}" in text, text


@pytest.mark.long
@pytest.mark.parametrize("ends", ["", "killed", "differs"])
def test_another_backend_for_other_devices(ends: str) -> None:
    """Without a GPU, the other backend is there and has nothing to do."""
    backend = "cpu:ddl,cuda:gloo"
    text = launch(SIZE, Path(PROGRAM), "--backend", backend, *(["--ends", ends] if ends else []), check=not ends)
    assert all(f"rank {rank} of {SIZE} on {backend}" in text for rank in range(SIZE)), text
    assert not ends or {"killed": "PeerLost: ", "differs": "MismatchError: "}[ends] in text, text


@pytest.mark.long
def test_scripts_for_gloo_stay_on_gloo_otherwise() -> None:
    text = launch(SIZE, PROGRAMS / "unchanged.py", "gloo")
    for rank in range(SIZE):
        assert f"rank {rank}: {['gloo'] * 3}" in text, text


@pytest.mark.long
def test_the_debug_mode_of_torch_that_wraps_groups() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls of the ranks before each collective, through a group of its own."""
    text = launch(SIZE, Path(PROGRAM), env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert all(said in text for said in SAID), text
