"""Scripts that import horovod, started by horovodrun and by others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.launch.starting import environment

PROGRAMS = Path(__file__).parent / "programs"
OWN = """
import numpy as np, ddlcore
ddlcore.init()
if ddlcore.rank() == 0:
    print(ddlcore.allreduce(np.full(1, 8.0), "gradient")[0])
ddlcore.join()
"""
RUN = [sys.executable, "-m", "horovod.runner.launch"]


def output_of(
    command: list[str], env: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> tuple[int, str, str]:
    """The exit code, and what came to stdout and stderr. Whatever the command has started ends with it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(dict(env or {})),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, err


def told(out: str) -> list[dict[str, Any]]:
    """What the ranks of place.py said, in rank order."""
    return sorted((json.loads(line[line.index("{") :]) for line in out.splitlines()), key=lambda one: one["rank"])


def test_a_rank_of_horovodrun_is_told_its_place_by_horovods_names() -> None:
    """The script is told before it imports anything. Averages after join are divided by all ranks; HOROVOD_* variables count."""
    where = ["-np", "2", "-H", "localhost:2", "--stall-check-warning-time-seconds", "33"]
    command = [*RUN, *where, sys.executable, str(PROGRAMS / "place.py")]
    code, out, err = output_of(command, {"HOROVOD_FUSION_THRESHOLD": "4096", "HOROVOD_CYCLE_TIME": "1"})
    assert code == 0, err
    ranks = told(out)
    for rank, one in enumerate(ranks):
        of_host = {"HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": "2"}
        cross = {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
        assert one["told"].items() >= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", **of_host, **cross}.items()
        assert (one["rank"], one["size"]) == (rank, 2)
        assert one["settings"] == {"fusion_bytes": 4096, "stall_warning_s": 33.0, "join_average": "size"}
    assert ranks[0]["average"] == 4.0
    assert err.count("HOROVOD_CYCLE_TIME: ") == 1


def test_the_variables_count_under_another_launcher() -> None:
    """The launcher here sets torchrun's variables. Only rank 0 warns of what has no effect."""
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "HOROVOD_FUSION_THRESHOLD": "4096",
        "HOROVOD_CYCLE_TIME": "1",
    }
    launch = (
        "import os, socket, subprocess, sys\n"
        "with socket.socket() as free:\n"
        "    free.bind(('localhost', 0))\n"
        "    port = str(free.getsockname()[1])\n"
        "ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, 'RANK': rank, 'MASTER_PORT': port})\n"
        "         for rank in '01']\n"
        "sys.exit(max(one.wait() for one in ranks))\n"
    )
    code, out, err = output_of([sys.executable, "-c", launch, str(PROGRAMS / "place.py")], shared)
    assert code == 0, err
    ranks = told(out)
    assert [one["settings"]["fusion_bytes"] for one in ranks] == [4096, 4096]
    assert ranks[0]["average"] == 4.0
    assert err.count("HOROVOD_CYCLE_TIME: ") == 1


def test_ddls_own_variable_says_how_averages_are_divided() -> None:
    """DDL_JOIN_AVERAGE counts more than the default of horovod's packages."""
    command = [*RUN, "-np", "2", sys.executable, str(PROGRAMS / "place.py")]
    code, out, err = output_of(command, {"DDL_JOIN_AVERAGE": "contributors"})
    assert code == 0, err
    assert told(out)[0]["average"] == 8.0


def test_a_program_of_ddls_own_packages_divides_as_they_do() -> None:
    """This is so under horovodrun, too, because such a program does not use horovod's packages."""
    code, out, err = output_of([*RUN, "-np", "2", sys.executable, "-c", OWN])
    assert (code, out) == (0, "[0] 8.0\n"), err


def test_a_torch_script_trains() -> None:
    """The script trains under horovodrun without a changed line."""
    code, out, err = output_of(
        [*RUN, "-np", "2", "-H", "localhost:2", sys.executable, str(PROGRAMS / "torch_script.py")]
    )
    assert (code, out) == (0, "[0] learned\n"), err


@pytest.mark.long
@pytest.mark.parametrize("name", ["keras", "tf1", "mxnet"])
def test_a_script_of_each_framework_trains(name: str) -> None:
    """The script trains under horovodrun without a changed line."""
    if name == "mxnet" and not find_spec("mxnet"):
        pytest.skip("MXNet is not installed: it needs numpy 1.26, which has no wheel for this Python")
    code, out, err = output_of(
        [*RUN, "-np", "2", "-H", "localhost:2", sys.executable, str(PROGRAMS / f"{name}_script.py")],
        {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert (code, out) == (0, "[0] learned\n"), err


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_digits_are_learned_by_adasum(size: int) -> None:
    """With the learning rate of one process, 95 % of the images that were not seen are recognized."""
    program = PROGRAMS / "adasum_digits.py"
    code, out, err = output_of([*RUN, "-np", str(size), sys.executable, str(program)])
    assert (code, out) == (0, "[0] learned\n"), err


@pytest.mark.long
def test_an_elastic_script_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Rank 1 of three kills itself after ten batches; the others train to the end."""
    mark = tmp_path / "killed"
    command = [*RUN, "-np", "3", "--min-np", "2", sys.executable, str(PROGRAMS / "elastic_script.py"), str(mark)]
    code, out, err = output_of(command)
    assert "learned 60 True" in out, err
    assert code == 0, err


def test_a_function_runs_on_several_ranks() -> None:
    """``horovod.run`` calls a function on one rank unless told otherwise, and sets Horovod's variables for its ranks."""
    code = (
        "import os, horovod\n"
        "def place(more): return os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'], more\n"
        "print(horovod.run(place, args=(5,)), horovod.run(place, kwargs={'more': 6}, num_proc=2))\n"
    )
    returned, out, err = output_of([sys.executable, "-c", code])
    assert (returned, out) == (0, "[('0', '1', 5)] [('0', '2', 6), ('1', '2', 6)]\n"), err
