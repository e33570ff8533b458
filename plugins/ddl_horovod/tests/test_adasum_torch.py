"""op=Adasum in the reductions of horovod.torch and its optimizer, in worlds of threads."""

from __future__ import annotations

import copy
import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from ddlcore.api import add_process_set
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from plugins.ddl_horovod.tests.formula import summed

SIZE = 3


def tensor_of(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).normal(size=(4, 5)) + 0.5).to(dtype)


def wanted(dtype: torch.dtype = torch.float64, factor: float = 1.0) -> Any:
    return factor * summed([tensor_of(rank, dtype).double().numpy() for rank in range(SIZE)])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)
def test_all_reductions(dtype: torch.dtype, tolerance: float) -> None:
    """All eight reductions give the adaptive sum, with and without factors and names."""

    def program(rank: int, job: Job) -> None:
        def check(result: torch.Tensor, factor: float = 1.0) -> None:
            assert result.dtype is dtype and result.shape == (4, 5)
            np.testing.assert_allclose(
                result.detach().double().numpy(), wanted(dtype, factor), rtol=tolerance, atol=tolerance
            )

        def mine() -> torch.Tensor:
            return tensor_of(rank, dtype)

        given = mine()
        check(hvd.allreduce(given, op=hvd.Adasum))
        assert torch.equal(given, mine())
        check(hvd.allreduce(given, name="factors", op=hvd.Adasum, prescale_factor=2.0, postscale_factor=3.0), 6.0)
        check(hvd.allreduce(given, None, "fourth", hvd.Compression.none, hvd.Adasum))
        check(hvd.synchronize(hvd.allreduce_async(given, op=hvd.Adasum)))
        assert hvd.allreduce_(given, op=hvd.Adasum) is given
        check(given)
        given = mine()
        handle = hvd.allreduce_async_(given, None, None, hvd.Adasum)
        assert hvd.synchronize(handle) is given and hvd.poll(handle)
        check(given)
        both = [mine(), mine()]
        for one in hvd.grouped_allreduce(both, op=hvd.Adasum):
            check(one)
        for one in hvd.synchronize(hvd.grouped_allreduce_async(both, op=hvd.Adasum)):
            check(one)
        assert hvd.grouped_allreduce_(both, op=hvd.Adasum)[0] is both[0]
        check(both[1])
        both = [mine(), mine()]
        assert hvd.synchronize(hvd.grouped_allreduce_async_(both, op=hvd.Adasum))[1] is both[1]
        check(both[0])

    run_world(SIZE, program)


def test_the_gradient_is_an_adaptive_sum_too() -> None:
    """The gradient of a reduction is the adaptive sum of the ranks' gradients."""

    def program(rank: int, job: Job) -> torch.Tensor:
        x = tensor_of(rank).requires_grad_()
        (hvd.allreduce(x, op=hvd.Adasum) * tensor_of(rank + 10)).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = summed([tensor_of(rank + 10).numpy() for rank in range(SIZE)])
    for gradient in run_world(SIZE, program):
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-12)


def test_compressed_tensors_are_summed() -> None:
    """A compressor, ddl's or one of the user's own, is applied before the reduction and undone after it."""

    class Halves(hvd.compression.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
            return tensor / 2, "halved"

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: str) -> torch.Tensor:
            assert ctx == "halved"
            return tensor * 2

    def program(rank: int, job: Job) -> None:
        found = hvd.allreduce(tensor_of(rank), op=hvd.Adasum, compression=hvd.Compression.fp16)
        assert found.dtype is torch.float64
        np.testing.assert_allclose(found.numpy(), wanted(), rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(hvd.allreduce(tensor_of(rank), op=hvd.Adasum, compression=Halves).numpy(), wanted())

    run_world(SIZE, program)


def test_what_adasum_does_not_support_is_refused() -> None:
    """The error names the argument, and is raised at once. Other operations do what they did before."""

    def program(rank: int, job: Job) -> None:
        x = torch.ones(2)
        with pytest.raises(NotImplementedError, match="sparse"):
            hvd.allreduce(x.to_sparse(), op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="not for int64"):
            hvd.allreduce_(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="supersedes average"):
            hvd.allreduce(x, average=True, op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="no weights"):
            hvd.allreduce(x, op=hvd.Adasum, weight=2)
        with pytest.raises(InvalidArgument, match=r"takes Compression\.none"):
            hvd.allreduce(x, op=hvd.Adasum, compression="fp16")
        for verb in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(ValueError, match="Adasum"):
                verb(x, op=hvd.Adasum)
        with pytest.raises(ValueError, match="Adasum"):
            hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Adasum)
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [2.0, 2.0]
        assert hvd.allreduce(x).tolist() == [1.0, 1.0]

    run_world(2, program)


def test_signatures_are_those_of_the_functions_below() -> None:
    """Tools that read signatures find those of ddl's functions."""
    assert list(inspect.signature(hvd.allreduce).parameters)[:5] == ["tensor", "average", "name", "compression", "op"]
    assert inspect.signature(hvd.DistributedOptimizer).parameters["backward_passes_per_step"].default == 1


MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def batches_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(4)]


def alone(size: int, passes: int) -> list[torch.Tensor]:
    """The parameters that the formula gives: each rank steps alone, and the changes are summed."""
    models = [copy.deepcopy(MODEL) for _ in range(size)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    for step in range(0, 4, passes):
        before = [[one.detach().clone() for one in model.parameters()] for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            for x in batches_of(rank)[step : step + passes]:
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        for at, start in enumerate(before[0]):
            changes = [
                (list(model.parameters())[at] - before[rank][at]).detach().numpy() for rank, model in enumerate(models)
            ]
            for model in models:
                list(model.parameters())[at].data = start + torch.from_numpy(summed(changes))
    return [one.detach() for one in models[0].parameters()]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_optimizer_sums_changes(size: int, passes: int) -> None:
    """With Adam, the parameters are those of the formula, and the same on all ranks."""

    def program(rank: int, job: Job) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        plain: Any = torch.optim.Adam(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(
            plain, named_parameters=model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
        )
        assert optimizer is plain and type(optimizer).__mro__[2] is torch.optim.Adam
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for at, x in enumerate(batches_of(rank)):
            if at % passes == 0:
                optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            if (at + 1) % passes == 0:
                optimizer.step()
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        return [one.detach() for one in model.parameters()]

    results = run_world(size, program)
    for found, expected in zip(results[0], alone(size, passes)):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6, atol=1e-8)
    assert all(torch.equal(one, first) for other in results[1:] for one, first in zip(other, results[0]))


def test_a_failed_reduction_leaves_the_parameters_as_they_were() -> None:
    """A rank does not keep its own step if the others' changes do not come: here, because they differ in shape."""

    def program(rank: int, job: Job) -> list[list[float]]:
        x = torch.nn.Parameter(torch.full((2 + rank,), 4.0))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=0.25), [("x", x)], op=hvd.Adasum)
        x.grad = torch.ones_like(x)
        with pytest.raises(MismatchError, match="shapes or types differ"):
            optimizer.step()
        found = [x.tolist()]
        y = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([y], lr=1.0), [("y", y)], op=hvd.Adasum)
        y.grad = torch.full((1,), -1.0)
        optimizer.step()
        return [*found, y.tolist()]

    results = run_world(2, program, settings={"verify_first_step": False})
    assert results == [[[4.0] * 2, [1.0]], [[4.0] * 3, [1.0]]]


@pytest.mark.parametrize("where", ["own step", "wait", "result"])
def test_an_interrupted_step_is_finished_by_the_next(where: str) -> None:
    """An interrupt before the changes are sent takes the step back. After that, the next call finishes the same step."""

    def program(rank: int, job: Job) -> list[float]:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], op=hvd.Adasum)
        x.grad = torch.full((1,), -1.0 - 2 * rank)
        if rank == 1:
            real = {"own step": "_own_step", "wait": "_reduction_of", "result": "_put"}[where]
            function = getattr(optimizer, real)

            def stop() -> None:
                raise KeyboardInterrupt

            def interrupted(*args: Any) -> Any:
                if where == "wait":
                    background, handle = function(*args)
                    answers = iter([stop, handle.wait])
                    return background, SimpleNamespace(wait=lambda: next(answers)())
                if where == "own step":
                    function(*args)
                    del optimizer._own_step
                else:
                    del optimizer._put
                raise KeyboardInterrupt

            setattr(optimizer, real, interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            if where == "own step":
                assert x.item() == 0.0
            else:
                x.grad = torch.full((1,), 100.0)  # counts nothing
            if where == "wait":
                del optimizer._reduction_of
        optimizer.step()
        found = [x.item()]
        x.grad = torch.full((1,), -1.0)
        optimizer.step()
        return [*found, x.item()]

    both = float(summed([np.ones(1), np.full(1, 3.0)])[0])
    assert run_world(2, program) == [pytest.approx([both, both + 1.0])] * 2


def test_a_closure_and_a_compressor_work_with_the_optimizer() -> None:
    """The closure runs on each rank alone; changes are sent as float16."""

    def program(rank: int, job: Job) -> torch.Tensor:
        x = torch.nn.Parameter(torch.full((2,), 4.0))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([x], lr=0.25), [("x", x)], compression=hvd.Compression.fp16, op=hvd.Adasum
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x * x).sum() * (1 + rank)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 32.0 * (1 + rank)
        return x.detach()

    expected = 4.0 + summed([np.full(2, -2.0), np.full(2, -4.0)])
    for found in run_world(2, program):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3)


def test_hooks_see_the_parameters_of_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks are called once in each step, after the reduction. A scheduler that was created before the optimizer was
    wrapped still works.
    """

    def program(rank: int, job: Job) -> list[float]:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([x], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen: list[float] = []
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        optimizer.register_step_post_hook(lambda *_: seen.append(x.item()))
        for _ in range(2):
            x.grad = torch.full((1,), -1.0)
            optimizer.step()
            scheduler.step()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_world(2, program, settings={"verify_every": 1}) == [[1.0, 1.5]] * 2
    assert "differ" not in caplog.text


def test_a_rank_outside_the_process_set_keeps_its_changes() -> None:
    """The members combine their changes."""

    def program(rank: int, job: Job) -> float:
        pair = add_process_set([0, 2])
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), op=hvd.Adasum, process_set=pair)
        x.grad = torch.full((1,), -1.0 - rank)
        optimizer.step()
        return x.item()

    both = float(summed([np.ones(1), np.full(1, 3.0)])[0])
    assert run_world(3, program, settings={"verify_first_step": False}) == pytest.approx([both, 2.0, both])


def test_what_the_optimizer_does_not_support_is_refused() -> None:
    """The error is raised when the optimizer is wrapped."""

    def program(rank: int, job: Job) -> None:
        x = torch.nn.Parameter(torch.ones(2))
        cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
            ("none", {}, "takes a torch.optim.Optimizer"),
            (torch.optim.SGD([x]), {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
            (torch.optim.SGD([x]), {"named_parameters": []}, "lacks 1 of the optimizer's parameters"),
            (hvd.DistributedOptimizer(torch.optim.SGD([x]), op=hvd.Adasum), {}, "already"),
            (torch.optim.SGD([x]), {"weight": 2.0}, "no weights"),
        )
        for optimizer, arguments, complaint in cases:
            with pytest.raises(ValueError, match=complaint):
                hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, **arguments)

    run_world(1, program)
