"""The shim uses only names that torch 2.13 to 2.15 have in common: a stand-in for the newer torch has no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ddl_gloo.shim import NATIVE, tensor

from ddlcore.contracts.transport import Memory, Transport
from ddlcore.errors import TransportError
from ddlcore.types import DType, ReduceOp
from plugins.ddl_gloo.tests.worlds import buffer, call, ones, open_group, unopened

RENAMED = {  # renamed in torch 2.15, which still has the old names for a while
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
COLLECTIVES = {"allreduce", "allgather", "alltoall", "barrier", "broadcast", "gather", "gather_single"}
COLLECTIVES |= {"monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send"}
OF_2_15 = COLLECTIVES | {"get_error", "name", "options", "rank", "reconfigure", "set_timeout", "shutdown", "size"}
OF_2_15 |= set(RENAMED.values())
REAL: Any = dist.ProcessGroupGloo


class Newer:
    """ProcessGroupGloo as in torch 2.15, without the deprecated names."""

    asked: set[str]
    _Options = REAL._Options
    create_device = REAL.create_device

    def __init__(self, *arguments: Any) -> None:
        self._real = REAL(*arguments)

    def __getattr__(self, name: str) -> Any:
        type(self).asked.add(name)
        if name not in OF_2_15:
            raise AttributeError(f"ProcessGroupGloo of torch 2.15 has no {name}")
        old = {new: old for old, new in RENAMED.items()}
        return getattr(self._real, old.get(name, name))


def test_the_newer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective works, small and large, on a group that has only the newer names."""

    def play(rank: int, transport: Transport) -> None:
        for count in (8, 400_000):
            counts = [count // 2] * 2
            whole, part, half = buffer(ones(count)), buffer(ones(count // 2)), buffer(ones(count, "float16"))
            for work in (
                lambda r, t: t.allreduce(whole, whole, ReduceOp.Sum),  # noqa: B023  # called at once
                lambda r, t: t.allreduce(half, half, ReduceOp.Sum),  # noqa: B023
                lambda r, t: t.broadcast(whole, 0),  # noqa: B023
                lambda r, t: t.allgatherv(part, whole, counts),  # noqa: B023
                lambda r, t: t.reducescatterv(whole, part, counts, ReduceOp.Sum),  # noqa: B023
                lambda r, t: t.alltoallv(whole, whole, [counts] * 2),  # noqa: B023
                lambda r, t: t.barrier(),
            ):
                call(work)(rank, transport)

    monkeypatch.setattr("ddl_gloo.transport.DIRECT_BARRIER", 1)
    Newer.asked = set()
    monkeypatch.setattr("ddl_gloo.shim.dist.ProcessGroupGloo", Newer)
    with open_group(2) as group:
        group.run(play)
    assert Newer.asked == {"allreduce", "broadcast", "barrier", "send", "recv"}


def test_names_that_are_used_are_there() -> None:
    """The installed torch has all names and options that the shim uses."""
    assert all(hasattr(REAL, name) for name in ("allreduce", "broadcast", "barrier", "send", "recv", "_Options"))
    for options in (dist.AllreduceOptions(), dist.BroadcastOptions(), dist.BarrierOptions()):
        assert hasattr(options, "timeout")


def test_what_gloo_is_left_to_reduce() -> None:
    """Gloo reduces neither 16-bit types nor the minimum and maximum of floats."""
    assert {dtype for dtype, _ in NATIVE}.isdisjoint({DType.I16, DType.U16, DType.F16, DType.BF16})
    assert (DType.F32, ReduceOp.Sum) in NATIVE
    assert (DType.F32, ReduceOp.Min) not in NATIVE
    assert (DType.I32, ReduceOp.Min) in NATIVE


def test_tensors_are_the_memory() -> None:
    """A tensor uses the memory without a copy; it has one dimension and no gaps."""
    memory = Memory(64)
    one = tensor(memory.address, 8, DType.I64)
    assert (one.data_ptr(), one.shape, one.is_contiguous()) == (memory.address, (8,), True)


def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without Gloo gives one line that says what to install."""
    monkeypatch.setattr("ddl_gloo.shim.dist.is_gloo_available", lambda: False)
    group = unopened(2)

    def play(rank: int, transport: Transport) -> None:
        with pytest.raises(TransportError, match="built without Gloo; pip install torch"):
            transport.open(group.context(rank))
        transport.close()

    group.run(play)
    group.ranks.close()
