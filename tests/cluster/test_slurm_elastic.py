"""An elastic job in a real Slurm allocation: an agent is lost on a node, and the node is called again."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.starting import ROOT
from tools.test_cluster import Slurm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed"),
]
PROGRAM = ROOT / "tests" / "faults" / "elastic_steps.py"


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until_s, what()
        time.sleep(0.2)


def test_a_node_comes_back(slurm: Slurm, tmp_path: Path) -> None:
    """srun starts one agent more, on that node alone; the processes of the other node are the first ones."""
    script = tmp_path / "job.sh"
    options = "--min-np 1 --host-discovery slurm --host-cooldown-s '1 4'"
    script.write_text(f"#!/bin/bash\n{sys.executable} -m ddlcore.launch run {options} {sys.executable} {PROGRAM}\n")
    out = tmp_path / "out"
    asked: list[str | Path] = ["-N2", "--ntasks-per-node=1", f"--output={out}", script]
    job = slurm.submit(asked, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})

    def sizes() -> list[int]:
        """The number of ranks in the last step of each process, by the age of the process."""
        files = sorted(tmp_path.glob("steps.*"), key=lambda file: file.stat().st_ctime)
        return [int(lines[-1].split()[2]) for file in files if (lines := file.read_text().splitlines())]

    def text() -> str:
        return out.read_text() if out.exists() else "no output yet"

    until(lambda: sizes() == [2, 2], text)
    agents = [pid for pid, line in slurm.cluster.processes("server2").items() if "agents.agent import main" in line]
    slurm.cluster.run("server2", ["kill", "-KILL", *map(str, agents)], check=True)
    until(lambda: len(sizes()) == 3, text)
    (tmp_path / "enough").touch()
    assert slurm.wait(job, 60.0) == ("COMPLETED", 0), text()
    assert text().count("total True ranks 2") == 2 and "rank 1 is started on server2" in text(), text()
