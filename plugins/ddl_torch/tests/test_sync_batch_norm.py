"""Batch norm over all ranks equals torch's over the combined batch: outputs, gradients and running statistics."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn

from ddlcore.testing import run_world

SIZE = 3
EVEN = [4, 4, 4]
UNEVEN = [1, 5, 3]
ONE_EMPTY = [3, 0, 4]
SHAPES: dict[str, tuple[int, ...]] = {"2d": (6,), "3d": (6, 5), "4d": (6, 5, 4), "5d": (6, 2, 3, 2)}
PLAIN: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def filled(module: Any) -> Any:
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2.0, 6))
            module.bias.copy_(torch.linspace(-1.0, 1.0, 6))
    return module


def compare(rows: list[int], shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, **options: Any) -> None:
    random = torch.Generator().manual_seed(5)
    data = [torch.randn(sum(rows), *shape, generator=random, dtype=torch.float64) * 3 + 10 for _ in range(3)]
    counts = torch.randn(sum(rows), *shape, generator=random, dtype=torch.float64)
    whole = filled(PLAIN[len(shape) + 1](6, dtype=torch.float64, **options))
    expected = []
    for x in data:
        x = x.to(dtype).double().clone().requires_grad_()
        out = whole(x)
        (out * counts).sum().backward()
        expected.append((out.detach(), x.grad))

    def play(rank: int, job: Any) -> None:
        begin = sum(rows[:rank])
        mine = slice(begin, begin + rows[rank])
        module = filled(ddl.SyncBatchNorm(6, **options)).to(torch.float64 if dtype is torch.float64 else torch.float32)
        for x, (out, grad) in zip(data, expected, strict=True):
            part = x[mine].to(dtype).clone().requires_grad_()
            found = module(part)
            assert found.dtype is dtype
            (found.double() * counts[mine]).sum().backward()
            assert part.grad is not None
            assert grad is not None
            torch.testing.assert_close(found.double(), out[mine], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(part.grad.double(), grad[mine], rtol=tolerance, atol=tolerance)
        if module.affine:
            for own, all_of_them in ((module.weight, whole.weight), (module.bias, whole.bias)):
                total = ddl.allreduce(own.grad, op=ddl.Sum)
                torch.testing.assert_close(total.double(), all_of_them.grad, rtol=tolerance, atol=tolerance)
        for name, buffer in whole.named_buffers():
            own = module.get_buffer(name)
            torch.testing.assert_close(own.double(), buffer.double(), rtol=tolerance, atol=tolerance)

    run_world(len(rows), play)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [EVEN, UNEVEN, ONE_EMPTY], ids=["even", "uneven", "one empty"])
def test_as_one_batch(rows: list[int], shape: str) -> None:
    """Three steps in float64 equal those on the combined batch."""
    compare(rows, SHAPES[shape], torch.float64, 1e-10)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    """Each option does the same as in torch."""
    compare(UNEVEN, SHAPES["4d"], torch.float64, 1e-10, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2)], ids=str)
def test_types(dtype: torch.dtype, tolerance: float) -> None:
    """Statistics are float32 at least, even for 16-bit inputs; sums of squares would lose precision here."""
    compare(UNEVEN, SHAPES["4d"], dtype, tolerance)


def test_evaluation() -> None:
    """Evaluation uses the running statistics, or this rank's batch if there are none, and waits for no other rank."""

    def play(rank: int, job: Any) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for tracks in (True, False):
            own = ddl.SyncBatchNorm(6, track_running_stats=tracks).eval()
            plain = nn.BatchNorm1d(6, track_running_stats=tracks).eval()
            if rank == 0:  # only this rank evaluates
                torch.testing.assert_close(own(x), plain(x))

    run_world(2, play)


def test_a_world_of_one() -> None:
    """In a world of one rank the layer is the same as torch's."""

    def play(rank: int, job: Any) -> None:
        x = torch.randn(4, 6)
        own, plain = ddl.SyncBatchNorm(6), nn.BatchNorm1d(6)
        torch.testing.assert_close(own(x), plain(x))
        torch.testing.assert_close(own.running_var, plain.running_var)

    run_world(1, play)


def test_state_dict_is_torchs() -> None:
    """Checkpoints can be exchanged with torch's layers."""
    state = nn.BatchNorm2d(6).state_dict()
    ddl.SyncBatchNorm(6).load_state_dict(state)


def test_refusals() -> None:
    """Wrong channels, too few dimensions and one value per channel in the whole world are refused."""

    def play(rank: int, job: Any) -> None:
        module = ddl.SyncBatchNorm(6)
        with pytest.raises(ValueError, match="6 channels"):
            module(torch.ones(2, 5))
        with pytest.raises(ValueError, match="at least 2D"):
            module(torch.ones(6))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.ones(1 - rank, 6))

    run_world(2, play)


def test_layers_without_input_gradient() -> None:
    """If the input needs no gradient, as for the first layer, weight and bias still get theirs."""

    def play(rank: int, job: Any) -> None:
        module = ddl.SyncBatchNorm(6)
        module(torch.randn(4, 6)).sum().backward()
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [4.0] * 6

    run_world(2, play)
