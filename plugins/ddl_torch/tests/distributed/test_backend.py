"""ddl as one of several backends of a process group."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddl_torch.distributed.creating import create, group_class
from ddl_torch.distributed.group import BACKENDS_IN_PYTHON, DdlProcessGroup

from ddlcore import api
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.distributed.groups import options

CPU = torch.device("cpu")
CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
needs_torch = pytest.mark.skipif(
    not BACKENDS_IN_PYTHON, reason=f"torch {torch.__version__} knows no backends in Python: 2.14 does"
)


def torch_group(name: str, devices: list[torch.device]) -> Any:
    """Return what says of torch's process group what its methods say."""
    return SimpleNamespace(_get_backend_name=lambda: name, _device_types=devices)


def test_a_group_of_its_own_where_there_is_no_other_backend() -> None:
    assert group_class(None) is group_class(torch_group("custom", [])) is DdlProcessGroup


@needs_torch
def test_torch_finds_a_backend_of_the_group() -> None:
    """As Python code and C++ code of torch look for it."""
    store = dist.HashStore()

    def play(rank: int, job: api.Job) -> None:
        group = DdlProcessGroup(store, rank, range(2), api.global_process_set, timedelta(seconds=60), False, store)
        found = dist.ProcessGroup._get_backend(group, CPU)
        assert (found.rank(), found.size(), found.name(), found.options.backend) == (rank, 2, "ddl", "ddl")
        assert dist.ProcessGroup._device_types.fget(group) == group._device_types == [CPU]

    run_world(2, play)


@needs_torch
@pytest.mark.parametrize(("name", "devices"), [("nccl", []), ("gloo", []), ("custom", [CPU]), ("nccl", [CPU])])
def test_a_backend_where_there_are_others(name: str, devices: list[torch.device]) -> None:
    """``name``: of the backend that comes last; ``devices``: those whose backends are there already."""
    assert group_class(torch_group(name, devices)).__name__ == "DdlBackend"


def play(group: Any, rank: int) -> list[Any]:
    """Make calls, two of which contradict each other, and return what came of them."""
    came: list[Any] = []
    for step in range(12):  # the later ones are replayed
        tensor = torch.full((3,), float(rank + step))
        group.allreduce([tensor], options()).wait()
        came.append(tensor.tolist())
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (2,), check_invariants=True)
    group.allreduce([sparse], options()).wait()
    gathered = [torch.zeros(2), torch.zeros(2)]
    group.allgather([gathered], [torch.full((2,), float(rank))]).wait()
    got = torch.tensor([float(rank)])
    group.broadcast([got], options("Broadcast", rootRank=1)).wait()
    future = group.allreduce([torch.ones(2)], options()).get_future()
    future.wait()
    with pytest.raises(MismatchError, match="the ranks disagree"):
        group.allreduce([torch.ones(3 + rank)], options()).wait()
    group.barrier(options("Barrier")).wait()
    return [*came, sparse.to_dense().tolist(), [one.tolist() for one in gathered], got.tolist(), future.value()]


@needs_torch
def test_a_group_of_several_backends_is_not_reconfigured() -> None:
    asked = SimpleNamespace(process_group=torch_group("nccl", []), global_ranks_in_group=[], enable_reconfigure=True)
    with pytest.raises(InvalidArgument, match="a process group with several backends cannot be reconfigured"):
        create(asked)


@needs_torch
def test_what_torch_calls_is_what_the_group_does() -> None:
    from ddl_torch.distributed.backend import DdlBackend

    store = dist.HashStore()

    def as_backend(rank: int, job: api.Job) -> Any:
        backend = DdlBackend(store, rank, range(2), api.global_process_set, timedelta(seconds=60), False, store)
        group = dist.ProcessGroup(store, rank, 2)
        group._set_default_backend(CUSTOM)
        group._register_backend(CPU, CUSTOM, backend)
        assert (group.rank(), group.size(), backend.options.backend) == (rank, 2, "ddl")
        return play(group, rank)

    def as_group(rank: int, job: api.Job) -> Any:
        return play(
            DdlProcessGroup(store, rank, range(2), api.global_process_set, timedelta(seconds=60), False, store), rank
        )

    seen, wanted = run_world(2, as_backend), run_world(2, as_group)
    assert repr(seen) == repr(wanted)
