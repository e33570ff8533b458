"""Tests Gloo as a peer of `ddl bench`: every collective is right, and torch's own process groups are not touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ddl_torch.gloo_peer import GlooPeer

from ddlcore.process.job import Job
from ddlcore.testing import run_world
from ddlcore.types import Kind

SIZE = 3
RIGHT: dict[
    Kind, Callable[[int], list[int]]
] = {  # by rank: the source of rank r holds r + 1; two elements for each rank
    Kind.ALLREDUCE: lambda rank: [6] * 6,
    Kind.BROADCAST: lambda rank: [1] * 6,
    Kind.ALLGATHER: lambda rank: [1, 1, 2, 2, 3, 3],
    Kind.REDUCESCATTER: lambda rank: [6, 6],
    Kind.ALLTOALL: lambda rank: [1, 1, 2, 2, 3, 3],
}


def arrays(kind: Kind, rank: int, dtype: str) -> tuple[Any, Any]:
    """Return source and target as ddl bench passes them."""
    source = np.full(2 if kind is Kind.ALLGATHER else 6, rank + 1, dtype)
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        return source, source
    return source, np.zeros(2 if kind is Kind.REDUCESCATTER else 6, dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"])
def test_every_collective(dtype: str) -> None:
    """One operation may run repeatedly, in a process group of its own."""

    def body(rank: int, job: Job) -> None:
        peer = GlooPeer()
        peer.open(job.context("bench-gloo"))
        for kind, right in RIGHT.items():
            source, target = arrays(kind, rank, dtype)
            call = peer.operation(kind, source, target)
            for _ in range(2):
                source.fill(rank + 1)
                call()
                assert target.tolist() == right(rank)
        peer.close()
        peer.close()

    run_world(SIZE, body)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.ALLREDUCE, "int16"), (Kind.BARRIER, "float32")])
def test_what_it_lacks(kind: Kind, dtype: str) -> None:
    """Unsupported collectives and types raise before anything is timed."""
    array = np.zeros(4, dtype)
    with pytest.raises(NotImplementedError):
        GlooPeer().operation(kind, array, array)


@pytest.mark.long
@pytest.mark.processes
def test_ddl_bench_against_gloo() -> None:
    """`ddl bench` prints a table with ratios to Gloo within a few seconds."""
    words = ["bench", "-np", "2", "--against", "gloo", "--ops", "allreduce", "--sizes", "4,64K", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", *words], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "gloo µs" in lines[2] and "gloo/shm" in lines[2] and "gloo/ddl" in lines[2]
    assert [text[:8] for text in lines[3:5]] == ["     4 B", "  64 KiB"]
    assert all(text.count("[") == 2 for text in lines[3:5])
