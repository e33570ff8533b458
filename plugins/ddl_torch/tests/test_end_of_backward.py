"""When ``backward()`` returns, ``.grad`` is the reduced gradient, so a loop written for one process is right."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import STEPS, Part, agree, backward, failing_at

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(params=["on", "off"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DDL_OVERLAP", request.param)
    return str(request.param)


def gradients(part: Part) -> list[torch.Tensor]:
    return [param.grad for param in part.model.parameters() if param.grad is not None]


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
def test_clipping_without_a_word(overlap: str, options: dict[str, Any]) -> None:
    """backward, clip_grad_norm_, step is right without further calls, as users of DDP and Lightning write it."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step) * 10)
            nn.utils.clip_grad_norm_(part.model.parameters(), 0.3)
            optimizer.step()

    agree(train)


def test_noise_that_all_ranks_add(overlap: str) -> None:
    """If all ranks add the same noise to their gradients after backward, the gradients stay equal."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        random = torch.Generator().manual_seed(5)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step))
            for grad in gradients(part):
                grad.add_(torch.randn(grad.shape, generator=random, dtype=grad.dtype), alpha=0.1)
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("how", ["shared", "disjoint", "one rank has one loss less"])
def test_several_losses_before_a_step(overlap: str, how: str, op: Any) -> None:
    """Several backward passes before a step may compute gradients of the same or of other parameters.

    Some parameters get a gradient on one rank only; gradients are clipped after each pass.
    """

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.02, momentum=0.9), op=op)
        scale = 1.0 / part.size if op is ddl.Sum else 1.0
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(3):
                if how == "shared":
                    backward(part.loss(3 * step + number) * scale)
                elif how == "disjoint":
                    layer = [part.model.body, part.model.left, part.model.right][number]
                    rows = 6 if number == 0 else 8
                    x = torch.cat([x for _, (x, _) in part.mine(step)])
                    backward(torch.tanh(layer(nn.functional.pad(x, (0, rows - 6)))).square().mean() * scale)
                else:
                    weight = 0.5 if op is ddl.Sum or part.size == 1 else 1.0
                    losses = [
                        nn.functional.mse_loss(part.model(x, use_right=rank == number % 2), y) * weight
                        for rank, (x, y) in part.mine(step)
                    ]
                    backward(torch.stack(losses).sum())
                nn.utils.clip_grad_norm_(part.model.parameters(), 5.0)
            optimizer.step()

    agree(train)


def test_no_sync(overlap: str) -> None:
    """Gradients of three batches accumulate on each rank; the fourth pass reduces the sum, or else ``step`` does."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.02, momentum=0.9))
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(4):
                if part.size > 1 and (micro < 3 or step == 3):
                    with optimizer.no_sync():
                        backward(part.loss(4 * step + micro))
                else:
                    backward(part.loss(4 * step + micro))
            optimizer.step()

    agree(train)


def test_no_sync_keeps_gradients_local(overlap: str) -> None:
    """Within ``no_sync`` each rank sees its own gradients."""

    def play(rank: int, job: Any) -> None:
        param = nn.Parameter(torch.ones(2))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
        with optimizer.no_sync(), optimizer.no_sync():
            backward((param * (rank + 1)).sum())
        assert param.grad is not None
        assert param.grad.tolist() == [rank + 1.0] * 2
        backward((param * (rank + 1)).sum())
        assert param.grad.tolist() == [3.0] * 2

    run_world(2, play)


def test_sum_of_local_and_reduced_gradients(overlap: str) -> None:
    """With Sum, each pass reduces what it and the local passes before it have added, and no result twice."""

    def play(rank: int, job: Any) -> None:
        used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([used, other], lr=0.0), op=ddl.Sum)
        for set_to_none in (True, False, True, False) * 3:
            optimizer.zero_grad(set_to_none=set_to_none)
            backward((used * (rank + 1)).sum())
            assert used.grad is not None and other.grad is not None
            assert used.grad.tolist() == [3.0] * 2
            assert other.grad.tolist() == [0.0] * 2
            with optimizer.no_sync():
                backward((used * (rank + 1)).sum())
            backward((other * (rank + 1)).sum())
            assert other.grad.tolist() == [3.0] * 2
            assert used.grad.tolist() == [6.0] * 2
            optimizer.step()

    run_world(2, play)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 4, dtype=torch.float64)
        self.judge = nn.Linear(4, 1, dtype=torch.float64)


@pytest.mark.parametrize("named", [False, True], ids=["without names", "equal names"])
@pytest.mark.parametrize("judge_first", [False, True])
def test_a_pair_that_trains_against_each_other(overlap: str, judge_first: bool, named: bool) -> None:
    """In a GAN the judge gets gradients in the generator's pass and drops them; both have parameters of equal names."""

    def train(part: Part) -> None:
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            pair = part.model = Pair()
            for param in pair.parameters():
                param.copy_(torch.randn(param.shape, generator=random, dtype=torch.float64))

        def wrap(module: nn.Module) -> Any:
            bare = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
            if part.size == 1:
                return bare
            return ddl.DistributedOptimizer(bare, module.named_parameters() if named else None)

        part.begun = [param.detach().clone() for param in pair.parameters()]
        of_generator, of_judge = wrap(pair.generator), wrap(pair.judge)

        def judge(x: torch.Tensor) -> None:
            of_judge.zero_grad()
            backward(nn.functional.softplus(-pair.judge(x)).mean())
            backward(nn.functional.softplus(pair.judge(pair.generator(x).detach())).mean())
            of_judge.step()

        for step in range(STEPS):
            x = part.batch(step)[0][:, :4]
            if judge_first:
                judge(x)
            of_generator.zero_grad()
            backward(nn.functional.softplus(-pair.judge(pair.generator(x))).mean())
            of_generator.step()
            if not judge_first:
                judge(x)

    agree(train)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(overlap: str, reentrant: bool) -> None:
    """Layers whose forward pass runs again within backward are reduced, and so are the layers before and after them."""

    def train(part: Part) -> None:
        model = part.model
        optimizer = part.wrap(torch.optim.SGD(model.parameters(), **SGD))
        for step in range(STEPS):
            x, y = part.batch(step)
            optimizer.zero_grad()
            hidden = torch.tanh(model.body(x))
            out = checkpoint(model.left, hidden, use_reentrant=reentrant)
            out = out + checkpoint(model.right, hidden, use_reentrant=reentrant)
            backward(nn.functional.mse_loss(out, y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()

    agree(train)


@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("head", [True, False], ids=["a head outside", "nothing outside"])
def test_reentrant_checkpointing_of_a_shared_parameter(overlap: str, head: bool, op: Any) -> None:
    """The result is right, or an error names the parameter, because autograd adds to a gradient in flight."""

    def train(part: Part) -> None:
        weight = nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))
        last = nn.Parameter(torch.linspace(0, 1, 6, dtype=torch.float64))
        part.model = nn.ParameterList([weight, last] if head else [weight])
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.05), op=op)
        for step in range(STEPS):
            x = part.batch(step)[0].requires_grad_()
            optimizer.zero_grad()
            for _ in range(3):
                x = checkpoint(lambda x: torch.tanh(x @ weight), x, use_reentrant=True)
            loss = (x * last if head else x).square().mean()
            backward(loss / part.size if op is ddl.Sum else loss)
            nn.utils.clip_grad_norm_(part.model.parameters(), 0.3)
            optimizer.step()

    if overlap == "off":
        agree(train)
    else:
        with pytest.raises(RuntimeError, match=r"a second time within one backward\(\).*use_reentrant=False"):
            agree(train)


def test_a_rank_that_skips_backward_takes_part_in_step(overlap: str) -> None:
    """A rank without data takes part with zeros in synchronize() or step(), so that the other ranks can go on."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank, (x, y) in part.mine(step):
                if rank != step % 2:
                    backward(nn.functional.mse_loss(part.model(x), y) * part.share())
            if step % 3 == 0 and part.size > 1:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    agree(train)


def test_an_exception_in_backward(overlap: str) -> None:
    """All ranks skip a step whose backward has failed; if gradients were sent, the step must be completed first."""

    def train(part: Part) -> None:
        now = {"step": -1}
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        failing_at(part.model.body.weight, lambda: now["step"] in (2, 6))
        for step in range(STEPS):
            now["step"] = step
            optimizer.zero_grad()
            try:
                backward(part.loss(step))
            except ArithmeticError:
                if part.size > 1 and overlap == "on":
                    with pytest.raises(AssertionError, match=r"Call optimizer.synchronize\(\) first"):
                        optimizer.zero_grad()
                    now["step"] = -1
                    with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\)"):
                        backward(part.loss(step))
                    with pytest.raises(ddl.IncompleteGradients, match=r"call optimizer.zero_grad\(\)"):
                        optimizer.synchronize()  # all ranks failed alike, so none raises MismatchError
                continue
            optimizer.step()

    agree(train)


def test_a_parameter_put_into_a_group_by_hand() -> None:
    """A parameter put into ``param_groups`` directly makes the next step raise on every rank and say how to add it."""

    def play(rank: int, job: Any) -> None:
        one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([one], lr=0.1))
        backward((one.sum() + two.sum()) * rank)
        optimizer.step()
        optimizer.param_groups[0]["params"].append(two)
        optimizer.zero_grad()
        backward((one.sum() + two.sum()) * rank)
        with pytest.raises(ValueError, match=r"parameter 1 \(shape \(3,\)\).*add_param_group"):
            optimizer.step()
        del optimizer.param_groups[0]["params"][1]
        optimizer.step()
        optimizer.param_groups[0]["params"].clear()  # its gradient may still be reduced
        optimizer.step()

    run_world(2, play)


def test_a_newer_optimizer_takes_a_parameter_over(overlap: str) -> None:
    """Only the newer of two optimizers reduces a parameter's gradient; the older one steps on the same gradient."""

    def play(rank: int, job: Any) -> list[float]:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        old: Any = ddl.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), op=ddl.Sum, groups=[params[:2]])
        new: Any = ddl.DistributedOptimizer(torch.optim.SGD(params[:1], lr=0.1), op=ddl.Sum)
        for step in range(6):
            for param in params:
                param.grad = None
            backward(sum((param * (rank + 1)).sum() for param in params))  # type: ignore[arg-type]  # a tensor
            for param in params:
                assert param.grad is not None
                assert param.grad.tolist() == [3.0, 3.0]
            (old if step % 2 else new).step()
        return [param[0].item() for param in params]

    results = run_world(2, play)
    assert results[0] == results[1] == pytest.approx([1 - 6 * 0.3, 1 - 3 * 0.3, 1 - 3 * 0.3])


def test_the_steady_loop_has_no_control_message(overlap: str) -> None:
    """Loops with two passes per step, with a pair of optimizers and with accumulation are replayed."""

    def play(rank: int, job: Any) -> list[int]:
        found = []
        for kind in ("two passes", "pair", "accumulation"):
            one, two = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
            first: Any = ddl.DistributedOptimizer(torch.optim.SGD([one], lr=0.01))
            second: Any = ddl.DistributedOptimizer(torch.optim.SGD([two], lr=0.01))

            def step(
                kind: str = kind, one: Any = one, two: Any = two, first: Any = first, second: Any = second
            ) -> None:
                first.zero_grad()
                backward(one.sum())
                if kind == "accumulation":
                    with first.no_sync():
                        backward(one.sum())
                if kind != "pair":
                    backward(one.sum())
                first.step()
                if kind == "pair":
                    second.zero_grad()
                    backward((one * two).sum())
                    second.step()

            for _ in range(30):
                step()
            messages = []
            for _ in range(10):  # a rank that gets no CPU core for some time leaves replay and returns to it
                before = ddl.stats()["control_messages"]
                for _ in range(10):
                    step()
                messages.append(ddl.stats()["control_messages"] - before)
            found.append(min(messages))
        return found

    assert run_world(2, play) == [[0, 0, 0]] * 2
