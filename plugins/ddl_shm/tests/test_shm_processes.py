"""The shared-memory ring between real processes, one of which may be killed at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddl_shm.machine_code import SHM

from ddlcore.contracts.machine_code.loading import obtain
from plugins.ddl_shm.tests import shm_rank
from tests.tiers import long

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux"),
    pytest.mark.processes,
]
ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def _ranks(folder: Path, size: int, program: str) -> Iterator[list[subprocess.Popen[str]]]:
    obtain(SHM)  # else all of them would wait for one to compile
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, shm_rank.__file__, str(folder), str(rank), str(size), program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _output(process: subprocess.Popen[str], line: str = "") -> str:
    out, errors = process.communicate(line, timeout=160)
    assert process.returncode == 0, errors
    return out.strip()


@pytest.mark.parametrize("size", [2, 3, *long(6)])
def test_processes_agree(tmp_path: Path, size: int) -> None:
    """Allreduce, allgatherv and broadcast over several chunks; no key is left in the store."""
    with _ranks(tmp_path, size, "check") as processes:
        for process in processes:
            _output(process)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_killed_at_any_moment(tmp_path: Path, size: int) -> None:
    """kill -9 in the middle of the ring: the others wait quietly, and raise soon after their abort."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with _ranks(folder, size, "reduce") as processes:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == "running"
            time.sleep(random.Random(size * 10 + attempt).uniform(0.0, 0.2))
            victim, *others = processes if attempt % 2 else processes[::-1]
            victim.kill()
            victim.wait(20)
            time.sleep(0.15)
            assert all(other.poll() is None for other in others)
            seconds = [float(_output(other, "abort\n")) for other in others]
            assert max(seconds) < 20.0
