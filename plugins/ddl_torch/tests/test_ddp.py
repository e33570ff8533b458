"""A model is reduced by DistributedOptimizer or by DistributedDataParallel, never by both over the same ranks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ddl_torch as ddl
import pytest
import torch
import torch.distributed as dist
from ddl_torch import ddp
from ddl_torch.ddp import ADVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddlcore.errors import ReducedTwice
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.launching import PROGRAMS, launch

BOTH = "ReducedTwice: parameters of this DistributedOptimizer ({}) are also in a torch DistributedDataParallel module"
SIZE = 4
Sets = list[ddl.ProcessSet]


@pytest.fixture
def torchs_rank_0() -> Iterator[None]:
    """Make this process rank 0 of four in torch.distributed, whose other ranks do not exist.

    A collective of torch's backend "fake" returns at once.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield
    gc.collect()  # a later search for wrapped modules should not find those of this test
    dist.destroy_process_group()


def on_rank(acting: int, scene: Callable[[Sets], None]) -> None:
    """Run ``scene`` on the rank ``acting`` of ddl, while the other ranks wait.

    The scene gets two process sets: ranks 0 and 2, and ranks 1 and 3.
    """

    def play(rank: int, job: Any) -> None:
        across = [ddl.add_process_set([0, 2]), ddl.add_process_set([1, 3])]
        if rank == acting:
            scene(across)
        ddl.barrier()

    run_world(SIZE, play)


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def test_an_optimizer_of_a_wrapped_model_is_refused(torchs_rank_0: None) -> None:
    """DistributedOptimizer raises if a DistributedDataParallel already reduces its parameters.

    The error names the parameters and the ranks, and says what to do.
    """

    def scene(across: Sets) -> None:
        model = DistributedDataParallel(nn.Linear(2, 1))
        with pytest.raises(ReducedTwice) as info:
            optimizer_of(model)
        text = str(info.value)
        assert f"ReducedTwice: {text}".startswith(BOTH.format("module.weight and 1 more")), text
        assert "over the same 4 ranks" in text
        assert text.endswith(ADVICE)

    on_rank(0, scene)


@pytest.mark.parametrize(("part", "name"), [("", "0.weight and 3 more"), ("1", "1.weight and 1 more")])
def test_the_wrapping_of_a_model_with_an_optimizer_is_refused(torchs_rank_0: None, part: str, name: str) -> None:
    """DistributedDataParallel raises if a DistributedOptimizer reduces parameters of the model, or of a part of it."""

    def scene(across: Sets) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = optimizer_of(model)
        with pytest.raises(ReducedTwice) as info:
            DistributedDataParallel(model.get_submodule(part))
        assert f"ReducedTwice: {info.value}".startswith(BOTH.format(name)), info.value
        del optimizer

    on_rank(0, scene)


def test_ddp_and_an_optimizer_may_have_different_parameters(torchs_rank_0: None) -> None:
    """As in a GAN: one module is wrapped before the optimizer of another model is created, and one module after that."""

    def scene(across: Sets) -> None:
        first = DistributedDataParallel(nn.Linear(2, 1))
        model = nn.Linear(2, 1)
        optimizer = optimizer_of(model)
        assert DistributedDataParallel(nn.Linear(2, 1)) is not first
        del optimizer

    on_rank(0, scene)


def test_a_module_of_a_destroyed_group_is_not_in_the_way(torchs_rank_0: None) -> None:
    """torch.distributed was initialized again, and an old DistributedDataParallel reduces over no group any more."""
    model = nn.Linear(2, 1)
    old = DistributedDataParallel(model)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)

    def scene(across: Sets) -> None:
        for one in (nn.Linear(2, 1), model):  # another model, and the one that was wrapped
            optimizer_of(one)

    on_rank(0, scene)
    del old


def test_an_optimizer_that_no_longer_exists_is_not_in_the_way(torchs_rank_0: None) -> None:
    """A model may be wrapped after its optimizer was dropped, even if the optimizer was part of a reference cycle."""

    def scene(across: Sets) -> None:
        model = nn.Linear(2, 1)
        optimizer: Any = optimizer_of(model)
        optimizer.itself = optimizer
        del optimizer
        DistributedDataParallel(model)

    gc.disable()  # an automatic collection could drop the optimizer before, or run in another thread meanwhile
    try:
        on_rank(0, scene)
    finally:
        gc.enable()


def test_ddp_within_hosts_and_ddl_across_hosts_is_allowed(torchs_rank_0: None) -> None:
    """Both may reduce the same parameters if their ranks have only one rank in common."""

    def scene(across: Sets) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
        model = nn.Linear(2, 1)
        optimizer = optimizer_of(model, process_set=across[0])
        DistributedDataParallel(model, process_group=pairs[0])
        with pytest.raises(ReducedTwice, match="over the same 2 ranks"):
            DistributedDataParallel(model, process_group=pairs[1])
        del optimizer

    on_rank(0, scene)


def test_ranks_with_other_numbers_in_torch_are_a_warning(torchs_rank_0: None, caplog: pytest.LogCaptureFixture) -> None:
    """If torch's rank 0 is ddl's rank 3, it is not known whether both reduce over the same ranks."""

    def scene(across: Sets) -> None:
        model = nn.Linear(2, 1)
        optimizer = optimizer_of(model)
        DistributedDataParallel(model)
        del optimizer

    with caplog.at_level(logging.WARNING, "ddl"):
        on_rank(3, scene)
    (line,) = [record.getMessage() for record in caplog.records if "DistributedDataParallel" in record.getMessage()]
    assert "(weight and 1 more)" in line
    assert "torch numbers the ranks differently" in line
    assert line.endswith(ADVICE)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each scene of the program gave on rank 0, by its name."""
    out = launch(4, PROGRAMS / "wrapped.py", str(tmp_path_factory.mktemp("store") / "file"))
    lines = (line.partition("[0] ")[2].partition(": ") for line in out.splitlines() if line.startswith("[0] "))
    return {name: text for name, _, text in lines}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_model_that_was_wrapped_before(scenes: dict[str, str]) -> None:
    """DistributedOptimizer raises, and says over which ranks and what to do."""
    text = scenes["wrapped_before"]
    assert text.startswith(BOTH.format("module.weight and 1 more")), text
    assert "over the same 4 ranks" in text and text.endswith(ADVICE)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_model_that_is_wrapped_later(scenes: dict[str, str]) -> None:
    """The wrapping raises, also if it wraps only a part of the model."""
    assert scenes["wrapped_after"].startswith(BOTH.format("weight and 1 more")), scenes["wrapped_after"]
    assert scenes["wrapped_in_part"].startswith(BOTH.format("1.weight and 1 more")), scenes["wrapped_in_part"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_what_is_no_double_work_is_allowed(scenes: dict[str, str]) -> None:
    """Different parameters, an optimizer that is gone, and DDP within hosts with ddl across hosts."""
    assert scenes["other_parameters"] == "both work"
    assert scenes["dropped_before"] == "only one is left"
    assert scenes["two_levels"] == "4 ranks, DistributedDataParallel"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_ranks_that_cannot_be_compared_are_a_warning(scenes: dict[str, str]) -> None:
    """torch's numbers of the ranks are not ddl's: nobody knows whether both average over the same ranks."""
    assert scenes["numbered_otherwise"].startswith("warned: [")
    assert "torch numbers the ranks differently" in scenes["numbered_otherwise"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
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
