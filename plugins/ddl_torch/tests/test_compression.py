"""The Compression classes work as Horovod's, and tell the core which of its compressors to use."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.api import wire_compression
from ddlcore.testing import World, run_world


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ddl.Compression.none, torch.float32),
        (ddl.Compression.fp16, torch.float16),
        (ddl.Compression.bf16, torch.bfloat16),
    ],
)
def test_there_and_back(kind: Any, dtype: torch.dtype) -> None:
    """Floats are sent in the compressor's type and come back in their own; integers are unchanged."""
    x = torch.tensor([1.0, -2.5, 1024.0])
    packed, ctx = kind.compress(x)
    assert packed.dtype is dtype
    back = kind.decompress(packed, ctx)
    assert back.dtype is torch.float32
    assert back.tolist() == x.tolist()
    whole = torch.tensor([3])
    packed, ctx = kind.compress(whole)
    assert packed is whole
    assert kind.decompress(packed, ctx) is whole


fp16: Any = ddl.Compression.fp16


class Inherited(fp16):  # type: ignore[misc]  # its base is a class attribute, which mypy follows nowhere
    """A user's class that inherits from one of ddl's."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor * 100


def test_who_compresses() -> None:
    """The core compresses for ddl's classes and for names; any other class with both methods does it itself."""
    assert wire_compression(ddl.Compression.fp16) == ("fp16", None)
    assert wire_compression("bf16") == ("bf16", None)
    assert wire_compression(Inherited) == ("none", Inherited)
    with pytest.raises(ValueError, match=r"Compression\.none"):
        wire_compression(object())


@pytest.mark.parametrize("verb", ["allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"])
def test_own_class_in_verbs(verb: str) -> None:
    """A user's class runs around the collective, and its methods are differentiated."""

    def play(rank: int, job: Any) -> tuple[float, float]:
        x = torch.ones(2, requires_grad=True)
        given: Any = [x] if "grouped" in verb else x
        out = getattr(ddl, verb)(given, compression=Inherited)
        out = out[0] if "grouped" in verb else out
        out.sum().backward()
        assert x.grad is not None
        return out[0].item(), x.grad[0].item()

    assert run_world(2, play) == [(200.0, 200.0)] * 2


@pytest.mark.parametrize("verb", ["allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"])
def test_ours_in_verbs(verb: str) -> None:
    """With fp16, 2049 is sent as float16 and arrives as 2048 in float32."""

    def play(rank: int, job: Any) -> tuple[float, torch.dtype]:
        x = torch.full((2,), 2049.0)
        given: Any = [x] if "grouped" in verb else x
        out = getattr(ddl, verb)(given, compression=ddl.Compression.fp16)
        out = out[0] if "grouped" in verb else out
        return out[0].item(), out.dtype

    assert run_world(2, play) == [(2048.0, torch.float32)] * 2


@pytest.mark.parametrize(
    ("options", "compressed"),
    [
        ({}, True),
        ({"groups": 1}, True),
        ({"backward_passes_per_step": 2}, True),
        ({"compression": ddl.Compression.none}, False),
        ({"compression": "none", "groups": 1}, False),
    ],
    ids=["by the setting", "groups", "two passes", "none", "none in groups"],
)
def test_the_setting_is_for_gradients_that_nobody_spoke_of(options: dict[str, Any], compressed: bool) -> None:
    """The setting compresses gradients whose optimizer names no compression; it never compresses metrics."""

    def play(rank: int, job: Any) -> None:
        weight = torch.nn.Parameter(torch.zeros(50))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=ddl.Sum, **options)
        for step in range(8):
            for _ in range(options.get("backward_passes_per_step", 1)):
                (weight * (1 / 3)).sum().backward()
            optimizer.synchronize()
            assert weight.grad is not None
            single = torch.tensor(1 / 3) * options.get("backward_passes_per_step", 1)
            expected = 2 * (single.half().float() if compressed else single)
            assert (weight.grad == expected).all(), step
            optimizer.step()
            optimizer.zero_grad()
            metric = ddl.allreduce(torch.tensor([7e4]), name="loss", op=ddl.Sum)
            assert metric.item() == 1.4e5, step
        assert job.stats()["buckets_replayed"] > 0

    with World(2, settings={"compression": "fp16"}) as world:
        world.run(play)
