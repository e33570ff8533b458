"""Models with complex parameters train as one process would, and complex tensors have gradients through every verb."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import backward, parameters

STEPS, ROWS, SIZE = 6, 8, 2


class Rotation(nn.Module):
    """A complex matrix, a complex vector whose gradient is a conjugated view, a transposed one, and a real scale."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(5)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=random, dtype=torch.complex128))
        self.vector = nn.Parameter(torch.randn(3, generator=random, dtype=torch.complex128))
        self.turned = nn.Parameter(torch.randn(3, 4, generator=random, dtype=torch.complex128).t())
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.matrix * self.vector.conj() + x @ self.turned
        return self.scale * out


def rows(step: int, rank: int, size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 4, generator=random, dtype=torch.complex128)
    return x[rank * ROWS // size : (rank + 1) * ROWS // size]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - 1).abs().square().mean()
    return loss


def alone() -> list[torch.Tensor]:
    """Return the parameters of one process that trains on the whole batches."""
    model = Rotation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, rows(step, 0, 1)))
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 1}, {"groups": 2}, {"weight": 4}, {"op": ddl.Sum}],
    ids=["plain", "one group", "groups", "weighted", "sum"],
)
def test_training(options: dict[str, Any]) -> None:
    """Two ranks with half of the rows each reach the parameters of one process."""

    def play(rank: int, job: Any) -> list[torch.Tensor]:
        model = Rotation()
        bare = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        optimizer: Any = ddl.DistributedOptimizer(bare, named_parameters=model.named_parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, rows(step, rank, SIZE))
            backward(loss / SIZE if options.get("op") is ddl.Sum else loss)
            optimizer.step()
        return parameters(model)

    wanted = alone()
    for found in run_world(SIZE, play):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_a_conjugated_gradient_is_taken_for_its_values() -> None:
    """A gradient whose memory has other values than the tensor is averaged with the tensor's values, in each step."""

    def play(rank: int, job: Any) -> None:
        vector = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([vector], lr=1.0), [("vector", vector)])
        for step in range(4):
            optimizer.zero_grad()
            gradient = torch.tensor([1j, 2j, 3j]) * (rank + 1) * (step + 1)
            vector.backward(gradient.conj() if step else gradient.conj().resolve_conj())
            optimizer.synchronize()
            assert vector.grad is not None
            torch.testing.assert_close(vector.grad.resolve_conj(), torch.tensor([-1j, -2j, -3j]) * 1.5 * (step + 1))
            with optimizer.skip_synchronize():
                optimizer.step()

    run_world(SIZE, play)


def test_sparse_tensors_are_averaged() -> None:
    """Entries of complex numbers, also conjugated ones, are added and divided as others are."""

    def play(rank: int, job: Any) -> None:
        values = (torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)).conj()
        mine = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), values, (4,), check_invariants=False)
        total = [1 - 2j, 2 * (1 - 2j), 3 * (3 + 1j), 0]
        for op, divisor in ((ddl.Sum, 1), (ddl.Average, SIZE)):
            result = ddl.sparse_allreduce_async(mine, f"s{divisor}", op)()
            torch.testing.assert_close(result.to_dense().resolve_conj(), torch.tensor(total) / divisor)

    run_world(SIZE, play)


def test_verbs_have_gradients() -> None:
    """The gradient of a complex result is the sum of the ranks' gradients, or the average, as for real ones."""

    def play(rank: int, job: Any) -> None:
        factor = torch.tensor(1 + 2j) * (rank + 1)
        total = torch.tensor((1 - 2j) * sum(range(1, SIZE + 1)), dtype=torch.complex64)
        verbs: list[tuple[Any, int]] = [(lambda x: ddl.allreduce(x, op=ddl.Sum), 1), (ddl.allgather, SIZE)]
        for verb, divisor in verbs:
            x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
            backward((verb(x) * factor).real.sum())
            assert x.grad is not None
            torch.testing.assert_close(x.grad.resolve_conj(), total.expand(2) / divisor)
        x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
        backward((ddl.broadcast(x, 1) * factor).real.sum())
        assert x.grad is not None
        torch.testing.assert_close(x.grad.resolve_conj(), total.expand(2) / SIZE if rank == 1 else torch.zeros_like(x))

    run_world(SIZE, play)


def test_state_is_broadcast() -> None:
    """Complex parameters and floats of 8 bits get the values of the root."""

    def play(rank: int, job: Any) -> None:
        model = Rotation()
        model.register_buffer("small", torch.full((5,), 1.0 + rank).to(torch.float8_e4m3fn))
        with torch.no_grad():
            model.matrix.mul_(rank + 1)
        ddl.broadcast_parameters(model.state_dict(), root_rank=1)
        torch.testing.assert_close(model.matrix.detach(), Rotation().matrix.detach() * 2)
        small: Any = model.small
        assert small.float().tolist() == [2.0] * 5

    run_world(SIZE, play)
