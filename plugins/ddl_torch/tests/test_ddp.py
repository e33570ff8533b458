"""A model is reduced by DistributedOptimizer or by DistributedDataParallel, never by both over the same ranks."""

from __future__ import annotations

import pytest
import torch
from ddl_torch import ddp
from ddl_torch.ddp import ADVICE

from plugins.ddl_torch.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(400)]

BOTH = "ReducedTwice: parameters of this DistributedOptimizer ({}) are also in a torch DistributedDataParallel module"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each scene of the program gave on rank 0, by its name."""
    out = launch(4, PROGRAMS / "wrapped.py", str(tmp_path_factory.mktemp("store") / "file"))
    lines = (line.partition("[0] ")[2].partition(": ") for line in out.splitlines() if line.startswith("[0] "))
    return {name: text for name, _, text in lines}


def test_a_model_that_was_wrapped_before(scenes: dict[str, str]) -> None:
    """DistributedOptimizer raises, and says over which ranks and what to do."""
    text = scenes["wrapped_before"]
    assert text.startswith(BOTH.format("module.weight and 1 more")), text
    assert "over the same 4 ranks" in text and text.endswith(ADVICE)


def test_a_model_that_is_wrapped_later(scenes: dict[str, str]) -> None:
    """The wrapping raises, also if it wraps only a part of the model."""
    assert scenes["wrapped_after"].startswith(BOTH.format("weight and 1 more")), scenes["wrapped_after"]
    assert scenes["wrapped_in_part"].startswith(BOTH.format("1.weight and 1 more")), scenes["wrapped_in_part"]


def test_what_is_no_double_work_is_allowed(scenes: dict[str, str]) -> None:
    """Different parameters, an optimizer that is gone, and DDP within hosts with ddl across hosts."""
    assert scenes["other_parameters"] == "both work"
    assert scenes["dropped_before"] == "only one is left"
    assert scenes["two_levels"] == "4 ranks, DistributedDataParallel"


def test_ranks_that_cannot_be_compared_are_a_warning(scenes: dict[str, str]) -> None:
    """torch's numbers of the ranks are not ddl's: nobody knows whether both average over the same ranks."""
    assert scenes["numbered_otherwise"].startswith("warned: [")
    assert "torch numbers the ranks differently" in scenes["numbered_otherwise"]


@pytest.mark.parametrize(("library", "module"), [("trainer", "transformers"), ("accelerate", "accelerate")])
def test_libraries_that_wrap(library: str, module: str) -> None:
    """transformers' Trainer and Accelerate wrap the model under `ddl run`, and train without torch's variables."""
    pytest.importorskip(module, reason=f"{module} is not installed (the extra `test` has it)")
    out = launch(2, PROGRAMS / "trainer.py", library)
    assert sum(BOTH.format("body.weight and 1 more") in line for line in out.splitlines()) == 2, out
    out = launch(2, PROGRAMS / "trainer.py", library, env={"DDL_TORCH_ENV": "0"})
    assert sum("4 steps, 1 process, learned: True" in line for line in out.splitlines()) == 2, out


def test_a_step_pays_nothing() -> None:
    """No hook runs while a model computes: torch calls ours only when a module becomes part of another."""
    calls: list[str] = []

    def wrapping(outer: torch.nn.Module, name: str, inner: torch.nn.Module | None) -> None:
        calls.append(name)
        ddp._wrapping(outer, name, inner)

    handle = torch.nn.modules.module.register_module_module_registration_hook(wrapping)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        assert calls == ["0"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert calls == ["0"]
    finally:
        handle.remove()
