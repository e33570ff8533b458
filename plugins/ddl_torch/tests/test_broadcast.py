"""Parameters, optimizer states and objects are copied from one rank, and no optimizer takes a step meanwhile."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import Network, Part, backward, parameters

SIZE = 3


class Buffered(nn.Module):
    """A module with parameters and buffers of several types and layouts."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), float(rank)))
        self.turned = nn.Parameter(torch.full((4, 3), float(rank)).t())
        self.gaps = nn.Parameter(torch.full((6,), float(rank))[::2])
        self.short = nn.Parameter(torch.full((2,), float(rank), dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([bool(rank % 2)]))


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list"])
def test_broadcast_parameters(form: str) -> None:
    """Every tensor gets the root's values in place, whatever its type and layout."""

    def play(rank: int, job: Any) -> None:
        model: Any = Buffered(rank)
        params: Any = model.state_dict() if form == "state_dict" else model.named_parameters()
        ddl.broadcast_parameters(list(params) if form == "list" else params, 2)
        for tensor in model.parameters():
            assert tensor.unique().tolist() == [2.0]
            assert tensor.requires_grad
        if form == "state_dict":
            assert (int(model.count), bool(model.mask)) == (2, False)

    run_world(SIZE, play)


def test_broadcast_parameters_refusals() -> None:
    """Objects that are no tensors and tensors without names are refused."""

    def play(rank: int, job: Any) -> None:
        for wrong, text in [
            (3, "invalid params of type"),
            (torch.ones(3), "invalid params of type"),
            ([torch.ones(3)], "named_parameters"),
            ({"a": 1}, "a is no tensor"),
        ]:
            with pytest.raises(ValueError, match=text):
                ddl.broadcast_parameters(wrong, 0)

    run_world(1, play)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params, rank: torch.optim.SGD(params, lr=0.1 * (rank + 1), momentum=0.9, weight_decay=0.1),
    "adam": lambda params, rank: torch.optim.Adam(params, lr=0.01 * (rank + 1), amsgrad=True),
    "adam capturable lr": lambda params, rank: torch.optim.Adam(params, lr=torch.tensor(0.01 * (rank + 1))),
    "adadelta": lambda params, rank: torch.optim.Adadelta(params, lr=rank + 1),
    "rprop": lambda params, rank: torch.optim.Rprop(params, lr=0.01 * (rank + 1)),
}


def flat(state: Any) -> Any:
    """Return a state in a form that can be compared by value."""
    if isinstance(state, torch.Tensor):
        return state.dtype, state.tolist()
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    return [flat(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("trained", ["root", "all", "others", "none"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(name: str, trained: str, wrapped: bool) -> None:
    """State and hyperparameters become the root's, whichever ranks have a state already; no parameter changes."""

    def play(rank: int, job: Any) -> Any:
        part = Part(0, 1)
        optimizer = OPTIMIZERS[name](part.model.parameters(), rank)
        if trained == "all" or trained == ("root" if rank == 1 else "others"):
            for step in range(rank + 1):
                optimizer.zero_grad()
                backward(part.loss(step))
                optimizer.step()
        if wrapped:
            optimizer = ddl.DistributedOptimizer(optimizer, part.model.named_parameters())
        before = parameters(part.model)
        own = flat(optimizer.state_dict())
        ddl.broadcast_optimizer_state(optimizer, 1)
        assert all(torch.equal(a, b) for a, b in zip(before, part.model.parameters(), strict=True))
        found = flat(optimizer.state_dict())
        if rank == 1:
            assert found == own, "the root's state changed"
        optimizer.zero_grad()
        backward(part.loss(7))
        optimizer.step()
        return found

    results = run_world(2, play)
    assert results[0] == results[1]
    assert bool(results[0]["state"]) == (trained in ("root", "all"))


def test_lbfgs_state_is_refused() -> None:
    """The state of L-BFGS is refused, because it has no fixed form."""

    def play(rank: int, job: Any) -> None:
        with pytest.raises(ValueError, match=r"cannot broadcast torch.optim.LBFGS state"):
            ddl.broadcast_optimizer_state(torch.optim.LBFGS(Network().parameters()), 0)

    run_world(1, play)


def test_objects() -> None:
    """Any picklable object, tensors and functions included, can be broadcast and gathered."""

    def play(rank: int, job: Any) -> None:
        mine = {"rank": rank, "tensor": torch.full((2,), rank), "function": lambda: rank * 10}
        one = ddl.broadcast_object(mine, root_rank=2, name="one")
        assert (one["rank"], one["tensor"].tolist(), one["function"]()) == (2, [2, 2], 20)
        everyones = ddl.allgather_object(mine)
        assert [each["function"]() for each in everyones] == [0, 10, 20]
        pair = ddl.add_process_set([0, 2])
        if rank != 1:
            assert ddl.allgather_object(rank, process_set=pair) == [0, 2]
            assert ddl.broadcast_object(rank, 2, process_set=pair) == 2

    run_world(SIZE, play)
