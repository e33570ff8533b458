"""Tests gradients whose memory something else uses: another gradient, autograd while backward runs, or the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import backward

STEPS = 8  # some of them are replayed

Loss = Callable[[list[nn.Parameter], int, int], torch.Tensor]


def _flat_sum(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    a, b = params
    return ((rank + 1) * (a.view(-1) + b.view(-1))).sum()


def _views_of_two(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    base, delta = params
    return ((base.view(2, 6) + delta.view(2, 6)).square() * (rank + 1)).sum()


def _position_tables(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    one, two = params
    x = torch.linspace(0, 1 + rank + step, 12, dtype=torch.float64).view(1, 3, 4)
    return (x + one.view(3, 4).unsqueeze(0) + two.view(3, 4).unsqueeze(0)).square().sum()


def _embedding_and_position(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    table, pos = params
    words = torch.tensor([[rank, 1, (rank + step) % 3]])
    return (nn.functional.embedding(words, table.view(3, 4)) + pos.view(3, 4).unsqueeze(0)).square().sum()


def _bias_on_one_pixel(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    weight, bias = params
    x = torch.linspace(-1, 1 + rank, 12, dtype=torch.float64).view(1, 12, 1, 1)
    out = nn.functional.conv2d(x, torch.eye(12, dtype=torch.float64).view(12, 12, 1, 1)) * weight.view(1, 12, 1, 1)
    return (out + bias.view(1, 12, 1, 1)).square().sum()


def _through_a_chain(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    """Return a loss for which ``b.grad`` is a view of what backward still propagates to ``a``."""
    a, b = params
    hidden = torch.tanh(a * (rank + 1))
    return ((hidden.view(3, 4) + b.view(3, 4)).view(-1) * torch.arange(12.0, dtype=torch.float64)).square().sum()


def _shared_now_and_then(params: list[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    """Return a loss whose two gradients share memory in every fourth step, and look as before in all steps."""
    a, b = params
    if step % 4 == 3:
        return _flat_sum(params, rank, step)
    return (a.square() * (rank + 1)).sum() + (b.sin() * (rank + 2)).sum()


LOSSES = [
    _shared_now_and_then,
    _flat_sum,
    _views_of_two,
    _position_tables,
    _embedding_and_position,
    _bias_on_one_pixel,
    _through_a_chain,
]


def _parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64)),
        nn.Parameter(torch.linspace(1, 2, 12, dtype=torch.float64)),
    ]


def _expected(loss: Loss, op: Any, size: int) -> list[torch.Tensor]:
    params = _parameters()
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        # In one pass, because in a second pass torch itself would add to a shared gradient twice.
        losses = [loss(params, rank, step) for rank in range(size)]
        (torch.stack(losses).sum() / (size if op is ddl.Average else 1)).backward()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__.strip("_"))
def test_shared_gradients_are_reduced_once(
    loss: Loss, op: Any, overlap: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are right even if two of them share one storage, or if backward still reads it."""
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(rank: int, job: Any) -> list[torch.Tensor]:
        params = _parameters()
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(params, lr=0.01, momentum=0.9), op=op)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(loss(params, rank, step))
            optimizer.step()
        return [param.detach() for param in params]

    for found in run_world(2, play, backend=backend):
        for ours, theirs in zip(found, _expected(loss, op, 2), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_gradients_of_others_are_left_alone(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another tensor shares a parameter's gradient memory, its values stay this rank's own.

    Such tensors are an input's gradient and a tensor that a hook has kept.
    """
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(rank: int, job: Any) -> None:
        pos = nn.Parameter(torch.zeros(3, 4))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([pos], lr=0.0))
        for _ in range(STEPS):
            optimizer.zero_grad()
            noise = torch.zeros(1, 3, 4, requires_grad=True)
            kept: list[torch.Tensor] = []
            total = noise + pos.unsqueeze(0)
            total.register_hook(kept.append)
            backward((total * (rank + 1)).sum())
            assert noise.grad is not None and pos.grad is not None
            assert pos.grad.unique().tolist() == [1.5]
            assert noise.grad.unique().tolist() == [rank + 1.0]
            assert kept[0].unique().tolist() == [rank + 1.0]
            optimizer.step()

    run_world(2, play)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_buffer_of_all_gradients_gets_the_results(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a program has made all ``.grad`` views of one buffer, it finds the reduced gradients in the buffer."""
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(rank: int, job: Any) -> None:
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
        buffer = torch.zeros(7)
        params[0].grad = buffer[:3]
        params[1].grad = buffer[3:].view(2, 2)
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            backward(sum((param * (rank + 1)).sum() for param in params))  # type: ignore[arg-type]  # a tensor
            assert buffer.tolist() == [1.5] * 7
            optimizer.step()

    run_world(2, play)


def test_two_optimizers_that_share_memory() -> None:
    """Gradients of two optimizers may share one storage too."""

    def play(rank: int, job: Any) -> None:
        a, b = _parameters()
        both: list[Any] = [ddl.DistributedOptimizer(torch.optim.SGD([param], lr=0.0)) for param in (a, b)]
        for step in range(STEPS):
            for optimizer in both:
                optimizer.zero_grad()
            backward(_flat_sum([a, b], rank, step))
            assert a.grad is not None and b.grad is not None
            assert a.grad.unique().tolist() == b.grad.unique().tolist() == [1.5]
            for optimizer in both:
                optimizer.step()

    run_world(2, play)


@pytest.mark.parametrize("way", ["set_", "data", "resize_", "storage resize_"])
def test_memory_in_flight_stays(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a gradient gets other memory while it is reduced, the old memory lives until then, or torch refuses."""
    monkeypatch.setenv("DDL_OVERLAP", "on")
    refused: list[str] = []

    def change(param: torch.Tensor) -> None:
        grad = param.grad
        assert grad is not None
        try:
            if way == "set_":
                grad.set_(torch.full((5,), 7.0).untyped_storage(), 0, (5,), (1,))
            elif way == "data":
                grad.data = torch.full((4096,), 7.0)
            elif way == "resize_":
                grad.resize_(1 << 20)
            else:
                grad.untyped_storage().resize_(0)
        except RuntimeError as error:
            refused.append(str(error))
            if way == "resize_":
                grad.resize_(4096)  # torch has set the shape before it refused to resize

    def play(rank: int, job: Any) -> None:
        params = [nn.Parameter(torch.ones(4096)) for _ in range(4)]
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        assert optimizer._ddl.active
        for param in params:
            param.register_post_accumulate_grad_hook(change)
        for _ in range(STEPS):
            for param in params:
                param.grad = None
            backward(sum((param * (rank + 1)).sum() for param in params))  # type: ignore[arg-type]  # a tensor
            for param in params:
                assert param.grad is not None
                if "resize" in way:
                    assert param.grad.unique().tolist() == [1.5]
                else:
                    assert param.grad.unique().tolist() == [7.0], "what the program has put there"

    run_world(2, play)
    assert len(refused) == (2 * STEPS * 4 if "resize" in way else 0)


def test_autograd_notices_that_a_gradient_was_written() -> None:
    """The reduction raises the version of ``.grad``, so autograd notices if a program had saved it."""

    def play(rank: int, job: Any) -> None:
        param = nn.Parameter(torch.ones(4))
        seen: list[int] = []

        def note(one: torch.Tensor) -> None:
            assert one.grad is not None
            seen.append(one.grad._version)

        param.register_post_accumulate_grad_hook(note)
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward((param * (rank + 1)).sum())
            assert param.grad is not None
            assert param.grad._version > seen[-1]
            optimizer.step()

    run_world(2, play)
