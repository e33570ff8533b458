"""Buckets appear by name in torch's profiler, if the setting asks for it."""

from __future__ import annotations

import threading

import ddl_torch as ddl
import pytest
import torch
from ddl_torch.adapter import TorchAdapter
from torch.profiler import ProfilerActivity, profile

from ddlcore.api import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(240)

TITLE = "ddl ALLREDUCE allreduce.grads"
TRIES = 10  # each has as many steps as are needed to leave discovery


@pytest.mark.parametrize("wanted", [True, False])
def test_batches_appear_by_name_where_that_is_wanted(wanted: bool) -> None:
    """Buckets appear on the thread that runs them.

    In replay over shared memory this is the training thread, which waits for them, unless the engine is faster; so the
    steps are tried several times.
    """
    names: set[str] = set()
    meet = threading.Barrier(2)

    def steps() -> None:
        tensor = torch.ones(8)
        for _ in range(20):
            ddl.allreduce_(tensor, name="grads", op=ddl.Average)

    def program(rank: int, job: Job) -> None:
        for _ in range(TRIES):
            meet.wait(40)
            if TITLE in names:
                break
            meet.wait(40)  # wait until both ranks have looked
            if rank == 0:
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    steps()
                names.update(event.name for event in seen.events())
            else:
                steps()

    with World(2, backend="shm", settings={"profiler_ranges": wanted}) as world:
        world.run(program)
    assert any("ones" in name for name in names), "the profiler saw nothing"
    assert (TITLE in names) is wanted, names


def test_no_range_while_no_profiler_runs() -> None:
    """No range is entered while no profiler runs."""
    if torch.cuda.is_initialized():
        pytest.skip("with CUDA in use there is always a range, for NVTX")
    adapter = TorchAdapter()
    assert adapter.range("x") is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert adapter.range("x") is not None


def test_a_name_with_braces_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with braces is not taken for a format string by the NVTX ranges that are used with CUDA."""
    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    found = TorchAdapter().range("ddl ALLREDUCE layers.{i}.weight")
    assert found is not None
    with found:
        assert pushed == ["ddl ALLREDUCE layers.{i}.weight"]
    assert pushed[1:] == ["end"]
