"""Tests which device belongs to a rank, as torch numbers devices."""

from __future__ import annotations

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import World


@pytest.mark.parametrize(
    ("count", "devices"),
    [(0, ["cpu", "cpu"]), (1, ["cuda:0", "cuda:0"]), (2, ["cuda:0", "cuda:1"]), (8, ["cuda:0", "cuda:1"])],
)
def test_local_device(monkeypatch: pytest.MonkeyPatch, count: int, devices: list[str]) -> None:
    """Only the GPUs that torch sees count, whatever else is in the machine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with World(2) as world:
        assert world.run(lambda rank, job: ddl.local_device()) == [torch.device(name) for name in devices]
