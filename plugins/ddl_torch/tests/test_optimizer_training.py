"""Each way to train for ten steps gives the same parameters on two ranks as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import STEPS, Part, agree, backward, differences

SGD: Any = {"lr": 0.1, "momentum": 0.9}
Optimizer = torch.optim.Optimizer


def plain(part: Part, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(part.loss(step))
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, **SGD),
    "sgd foreach": lambda params: torch.optim.SGD(params, **SGD, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, **SGD, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam foreach": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Plain, foreach and fused optimizers train as in one process."""
    agree(lambda part: plain(part, part.wrap(OPTIMIZERS[name](part.model.parameters()))), tolerance=1e-9)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(name: str, made: str) -> None:
    """Schedulers, which replace ``step`` on the object, work whether they are made before or after wrapping."""

    def train(part: Part) -> None:
        bare = torch.optim.SGD(part.model.parameters(), **SGD)
        early = SCHEDULERS[name](bare) if made == "before" else None
        optimizer = part.wrap(bare)
        scheduler = early or SCHEDULERS[name](optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step))
            optimizer.step()
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it believes that step() was not called
        agree(train)


def test_reduce_on_plateau() -> None:
    """A scheduler that depends on a loss works if the loss is averaged over the ranks."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = part.loss(step)
            backward(loss)
            optimizer.step()
            loss = loss.detach()
            scheduler.step(float(loss if part.size == 1 else ddl.allreduce(loss)))

    agree(train)


def test_clipping_between_synchronize_and_step() -> None:
    """Clipping after ``synchronize`` uses the norm of the reduced gradients."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step))
            if part.size > 1:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)
            if part.size > 1:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    agree(train)


def test_clipping_in_a_step_hook() -> None:
    """A hook before ``step`` sees reduced gradients, even if it was registered before wrapping."""

    def train(part: Part) -> None:
        bare = torch.optim.SGD(part.model.parameters(), **SGD)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)

        bare.register_step_pre_hook(clip)
        plain(part, part.wrap(bare))

    agree(train)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("way", ["step", "unscale", "synchronize"])
def test_grad_scaler(way: str, fused: bool) -> None:
    """If a step is infinite on one rank, all ranks skip it and have the same scale at the end.

    ``way``: ``step`` alone, ``unscale_`` and clipping, or ``synchronize`` first.
    """

    def train(part: Part) -> float:
        optimizer: Any = part.wrap(torch.optim.Adam(part.model.parameters(), lr=0.01, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = part.loss(step)
            if step == 4 and part.rank == 0:
                loss = loss * float("inf")
            backward(scaler.scale(loss))
            if way == "synchronize" and part.size > 1:
                optimizer.synchronize()
            if way != "step":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.5)
            if way == "synchronize" and part.size > 1:
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales = agree(train, tolerance=1e-9)
    assert scales == [scales[0]] * 2


def test_autocast_bfloat16() -> None:
    """With float32 parameters and a bfloat16 forward pass, two ranks' gradients sum as those of two micro-batches."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            for _, (x, y) in part.mine(step):
                with torch.autocast("cpu", torch.bfloat16):
                    out = part.model(x)
                assert out.dtype is torch.bfloat16
                backward(nn.functional.mse_loss(out.float(), y) * part.share())
            optimizer.step()

    agree(train, tolerance=1e-6, kind=torch.float32)


@pytest.mark.long
@pytest.mark.timeout(540)
def test_compiled_model() -> None:
    """Gradients that come from compiled code (``torch.compile(model)``) are reduced."""

    def train(part: Part) -> None:
        compiled: Any = torch.compile(part.model, backend="aot_eager")
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            x, y = part.batch(step)
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(compiled(x), y))
            optimizer.step()

    agree(train)


def test_three_steps_of_a_compiled_layer() -> None:
    """Gradients are reduced if the forward pass of a layer is compiled. ``test_compiled_model`` compiles backward, too."""

    def train(part: Part) -> None:
        compiled: Any = torch.compile(part.model.body, backend="eager")
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(3):
            x, y = part.batch(step)
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(part.model.left(compiled(x)), y))
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=["single", "groups"])
def test_add_param_group_after_wrapping(options: dict[str, Any]) -> None:
    """Parameters that are added later are reduced too, with the learning rate of their group."""

    def train(part: Part) -> None:
        bare = torch.optim.SGD([*part.model.body.parameters(), *part.model.left.parameters()], **SGD)
        optimizer = part.wrap(bare, **options)
        for step in range(STEPS):
            if step == 3:
                optimizer.add_param_group({"params": list(part.model.right.parameters()), "lr": 0.05})
            optimizer.zero_grad()
            part.model.right.zero_grad()
            backward(part.loss(step))
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("by_keyword", [False, True], ids=["place", "keyword"])
@pytest.mark.parametrize("name", ["sgd", "lbfgs"])
def test_step_with_a_closure(name: str, by_keyword: bool) -> None:
    """Gradients computed by a closure are reduced, and L-BFGS evaluates equally often on all ranks."""

    def train(part: Part) -> None:
        params = part.model.parameters()
        bare = torch.optim.SGD(params, **SGD) if name == "sgd" else torch.optim.LBFGS(params, lr=0.1, max_iter=4)
        optimizer: Any = part.wrap(bare)
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = part.loss(step)
                backward(loss)
                return loss

            if by_keyword:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)

    agree(train, tolerance=1e-9)


@pytest.mark.parametrize("way", ["none", "zeros", "model none", "model zeros"])
def test_zero_grad(way: str) -> None:
    """Gradients may be set to None or to zero, by the optimizer or by the model."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        zero: Any = part.model.zero_grad if "model" in way else optimizer.zero_grad
        for step in range(STEPS):
            zero(set_to_none="none" in way)
            backward(part.loss(step))
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 1}], ids=str)
@pytest.mark.parametrize("when", ["before zero_grad", "after zero_grad"])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_requires_grad_changes(frozen_first: bool, when: str, options: dict[str, Any]) -> None:
    """A layer may be frozen and unfrozen, before and after wrapping."""

    def train(part: Part) -> None:
        layer = part.model.left
        layer.requires_grad_(not frozen_first)
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), **options)
        for step in range(STEPS):
            if when == "after zero_grad":
                optimizer.zero_grad()
            if step in (3, 7):
                layer.requires_grad_(frozen_first == (step == 3))
            if when == "before zero_grad":
                optimizer.zero_grad()
            backward(part.loss(step))
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"compression": ddl.Compression.none}], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_gradient_on_some_ranks(set_to_none: bool, options: dict[str, Any]) -> None:
    """If one rank leaves out a branch in a step, it takes part in its reduction with zeros."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), **options)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            for rank, (x, y) in part.mine(step):
                out = part.model(x, use_right=rank == step % 2)
                backward(nn.functional.mse_loss(out, y) * part.share())
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
def test_backward_passes_per_step(options: dict[str, Any]) -> None:
    """Three passes accumulate locally and are reduced once; the number may change between steps."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(
            torch.optim.SGD(part.model.parameters(), lr=0.02, momentum=0.9), backward_passes_per_step=3, **options
        )
        for step in range(STEPS):
            passes = 3 if step < 5 else 2
            if step == 5 and part.size > 1:
                optimizer.set_backward_passes_per_step(passes)
            optimizer.zero_grad()
            for micro in range(passes):
                backward(part.loss(10 * step + micro))
            optimizer.step()

    agree(train)


def grouping(part: Part, how: str) -> dict[str, Any]:
    model = part.model
    if how == "lists":
        return {"groups": [list(model.left.parameters()), [model.body.bias, model.right.weight]]}
    return {"groups": int(how)}


@pytest.mark.parametrize("how", ["1", "2", "4", "100", "lists"])
def test_groups(how: str) -> None:
    """Gradients of a group are reduced together; parameters in no group are reduced by themselves."""
    agree(lambda part: plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), **grouping(part, how))))


def test_groups_where_ranks_order_parameters_differently() -> None:
    """If ranks order their parameters differently, the first rank's order decides the groups."""

    def train(part: Part) -> None:
        params = list(part.model.parameters())
        plain(part, part.wrap(torch.optim.SGD(params[:: -1 if part.rank else 1], **SGD), groups=2))

    agree(train)


def test_process_set() -> None:
    """Ranks 0 and 2 train together; rank 1 is outside and steps on its own gradients."""

    def train(part: Part) -> None:
        plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD)))

    def play(rank: int, job: Any) -> list[torch.Tensor]:
        pair = ddl.add_process_set([0, 2])
        part = Part(min(rank, 1) if rank != 1 else 0, 2 if rank != 1 else 1)
        if rank == 1:
            bare = torch.optim.SGD(part.model.parameters(), **SGD)
            plain(part, ddl.DistributedOptimizer(bare, process_set=pair))
        else:
            plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), process_set=pair, groups=2))
        return [p.detach() for p in part.model.parameters()]

    alone = Part(0, 1)
    train(alone)
    expected = [p.detach() for p in alone.model.parameters()]
    for rank, found in enumerate(run_world(3, play)):
        assert differences(expected, found) < 1e-12, f"rank {rank}"


class Halves:
    """A user's own compressor, which sends float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        (ddl.Compression.none, 1e-12),
        (ddl.Compression.fp16, 2e-3),
        (ddl.Compression.bf16, 2e-2),
        ("fp16", 2e-3),
        (Halves, 1e-6),
    ],
    ids=["none", "fp16", "bf16", "by name", "own class"],
)
def test_compression(compression: Any, tolerance: float, options: dict[str, Any]) -> None:
    """The result is as exact as the compressed type allows, and is inexact unless compression is none."""

    def train(part: Part) -> None:
        plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1), compression=compression, **options))

    agree(train, tolerance=tolerance)
    if compression is not ddl.Compression.none:
        with pytest.raises(AssertionError, match="away from one process"):
            agree(train, tolerance=1e-12)


class Words(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.embedding = nn.Embedding(12, 3, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3))

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) * self.embedding(words)
        return out


@pytest.mark.parametrize("skips", [False, True], ids=["always", "some ranks skip it"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"compression": Halves}], ids=["single", "groups", "own class"])
@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def test_sparse_gradients(as_dense: bool, options: dict[str, Any], skips: bool) -> None:
    """Embedding gradients are gathered or made dense, and the optimizer gets sparse ones.

    Ranks have different words, and some words occur twice.
    """
    seen: list[bool] = []

    def train(part: Part) -> None:
        part.model = model = Words(part.model)
        optimizer = part.wrap(torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=as_dense, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank, (x, y) in part.mine(step):
                words = torch.tensor([step, 3, 3, rank])
                out = model(x, words) if not skips or step == 0 or rank != step % 2 else model.body(x)
                backward(nn.functional.mse_loss(out, y) * part.share())
            optimizer.step()
            if part.size > 1 and step == 0:
                grad = model.embedding.weight.grad
                assert grad is not None
                seen.append(grad.is_sparse)

    agree(train, tolerance=1e-6 if options.get("compression") else 1e-12)
    assert seen == [True] * 2


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
def test_gradient_predivide_factor(options: dict[str, Any]) -> None:
    """Dividing partly before and partly after the sum gives the average, also with groups."""

    def train(part: Part) -> None:
        plain(
            part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), gradient_predivide_factor=4.0, **options)
        )

    agree(train)


@pytest.mark.parametrize("options", [{}, {"groups": 1}], ids=str)
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_averages_stay_within_a_type(factor: float, options: dict[str, Any]) -> None:
    """An average of float16 gradients does not overflow although their sum does, for every predivide factor."""

    def play(rank: int, job: Any) -> float:
        param = torch.nn.Parameter(torch.ones(1))
        optimizer: Any = ddl.DistributedOptimizer(
            torch.optim.SGD([param], lr=0.1),
            compression=ddl.Compression.fp16,
            gradient_predivide_factor=factor,
            **options,
        )
        backward(40000 * param.sum())
        optimizer.synchronize()
        assert param.grad is not None
        return param.grad.item()

    assert run_world(2, play) == [40000.0] * 2


def test_sum() -> None:
    """op=Sum is right for losses that are shares of the whole."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), op=ddl.Sum)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step) / part.size)
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_worlds(size: int, backend: str) -> None:
    """Two and four ranks train as one process, over threads and over shared memory."""
    agree(
        lambda part: plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))), size=size, backend=backend
    )


def test_shared_parameters() -> None:
    """A parameter that is used twice has one gradient, which is sent once."""

    def train(part: Part) -> None:
        part.model.right.weight = part.model.left.weight
        plain(part, part.wrap(torch.optim.SGD(part.model.parameters(), **SGD)))

    agree(train)
