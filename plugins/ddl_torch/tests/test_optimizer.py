"""A wrapped optimizer is still the given optimizer, and reports wrong use."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore import api
from ddlcore.errors import MismatchError, NotInitialized
from ddlcore.process.jobs import local_jobs
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import Network, Part, backward


def made(part: Part, **options: Any) -> Any:
    return part.wrap(torch.optim.Adam(part.model.parameters(), lr=0.01), **options)


def step(part: Part, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    backward(part.loss(number))
    optimizer.step()


def on_ranks(play: Any, size: int = 2) -> list[Any]:
    return run_world(size, lambda rank, job: play(Part(rank, size) if size > 1 else Part(0, 1)))


def test_it_is_the_optimizer_that_was_given() -> None:
    """Wrapping returns the same object, which is still an instance of its class, with the same name and state."""

    def play(part: Part) -> None:
        bare: Any = torch.optim.Adam(part.model.parameters(), lr=0.01)
        optimizer: Any = part.wrap(bare)
        assert optimizer is bare
        names = dict(part.model.named_parameters())
        assert {name: param for param, name in optimizer._parameter_names.items()} == names
        assert isinstance(optimizer, torch.optim.Adam)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert type(optimizer).__name__ == "Adam"
        assert "Adam" in repr(optimizer)

    on_ranks(play)


def test_state_dict_is_the_bare_ones() -> None:
    """The state dict has the keys of the bare optimizer, and states can be exchanged in both directions."""

    def play(part: Part) -> None:
        optimizer = made(part)
        other = Part(0, 1)
        bare = torch.optim.Adam(other.model.parameters(), lr=0.01)
        step(part, optimizer)
        step(other, bare)
        mine, theirs = optimizer.state_dict(), bare.state_dict()
        assert mine.keys() == theirs.keys()
        assert mine["state"][0].keys() == theirs["state"][0].keys()
        assert mine["param_groups"][0].keys() == theirs["param_groups"][0].keys()
        bare.load_state_dict(mine)
        optimizer.load_state_dict(bare.state_dict())
        step(part, optimizer, 1)

    on_ranks(play)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_bare(way: str) -> None:
    """A copy has no hooks, so it must not wait for gradients: it is the bare optimizer with its state."""

    def play(part: Part) -> None:
        optimizer = made(part)
        step(part, optimizer)
        if way == "torch.save":
            file = io.BytesIO()
            torch.save(optimizer, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        else:
            other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        assert type(other) is torch.optim.Adam
        assert not hasattr(other, "synchronize")
        assert len(other.state_dict()["state"]) == len(optimizer.state_dict()["state"]) > 0
        other.step()
        copy.deepcopy(part.model)(part.batch(0)[0]).sum().backward()  # a copied model has no hooks, either

    on_ranks(play)


def test_a_forgotten_optimizer_leaves_the_parameters() -> None:
    """A deleted optimizer is freed without a garbage collection, and its hooks leave the parameters."""

    def play(part: Part) -> None:
        first = made(part)
        step(part, first)
        gone = weakref.ref(first)
        del first
        if gone() is not None:
            gc.collect()
        assert gone() is None
        assert not any(getattr(param, "_post_accumulate_grad_hooks", None) for param in part.model.parameters())
        step(part, made(part))

    on_ranks(play)


def test_a_world_of_one_has_no_hooks() -> None:
    """In a world of one rank everything behaves the same, and no hooks are added."""

    def play(part: Part) -> None:
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(part.model.parameters(), lr=0.1), groups=2)
        assert not any(getattr(param, "_post_accumulate_grad_hooks", None) for param in part.model.parameters())
        step(part, optimizer)
        backward(part.loss(1))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.set_backward_passes_per_step(2)
        optimizer.step(lambda: part.loss(2))

    on_ranks(play, size=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"named_parameters": [1, 2]}, "sequence of tuples"),
        ({"named_parameters": "duplicate"}, "must be unique. Found duplicates: body.weight"),
        ({"named_parameters": "missing"}, r"not named: group 0, parameter 0 \(shape \(8, 6\)\)"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"op": ddl.Adasum}, "not supported here, but by ddl-horovod"),
        ({"op": ddl.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"gradient_predivide_factor": 0.0}, "greater than 0"),
        ({"groups": 0}, "positive integer or a list of lists"),
        ({"groups": "all"}, "positive integer or a list of lists"),
        ({"compression": 5}, "Compression.none"),
        ({"process_set": ddl.ProcessSet([0])}, "not registered"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    """Invalid arguments raise ValueError at the call and leave the optimizer unchanged."""

    def play(part: Part) -> None:
        named = list(part.model.named_parameters())
        given = dict(options)
        if given.get("named_parameters") == "duplicate":
            given["named_parameters"] = [*named, ("body.weight", torch.ones(1))]
        if given.get("named_parameters") == "missing":
            given["named_parameters"] = named[1:]
        bare = torch.optim.SGD(part.model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=text):
            ddl.DistributedOptimizer(bare, **given)
        assert type(bare) is torch.optim.SGD

    on_ranks(play, size=1)


def test_wrapping_what_is_no_optimizer() -> None:
    """Objects that are not optimizers and optimizers that are wrapped already are refused."""

    def play(part: Part) -> None:
        with pytest.raises(ValueError, match=r"takes a torch.optim.Optimizer, not Network"):
            ddl.DistributedOptimizer(part.model)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(part.model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="already"):
            ddl.DistributedOptimizer(optimizer)

    on_ranks(play, size=1)


def test_before_init() -> None:
    """Wrapping before ``init`` raises NotInitialized."""
    with pytest.raises(NotInitialized, match=r"init\(\)"):
        ddl.DistributedOptimizer(torch.optim.SGD(Network().parameters(), lr=0.1))


def test_num_groups_is_deprecated() -> None:
    """``num_groups`` gives a DeprecationWarning and works as ``groups``."""

    def play(part: Part) -> None:
        with pytest.warns(DeprecationWarning, match="groups"):
            ddl.DistributedOptimizer(torch.optim.SGD(part.model.parameters(), lr=0.1), num_groups=2)

    on_ranks(play, size=1)


def test_skip_synchronize_steps_on_what_is_there() -> None:
    """If nothing was reduced, as within no_sync(), each rank steps on its own gradients."""

    def play(part: Part) -> list[float]:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1))
        with optimizer.no_sync():
            backward(part.loss(0))
        with optimizer.skip_synchronize():
            optimizer.step()
        return [float(param.detach().sum()) for param in part.model.parameters()]

    results = on_ranks(play)
    assert results[0] != results[1]


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
def test_zero_grad_after_backward(options: dict[str, Any]) -> None:
    """After backward gradients are reduced and nothing is in flight, so they may be cleared."""

    def play(part: Part) -> list[float]:
        optimizer = made(part, **options)
        for number in range(4):
            backward(part.loss(number))
            optimizer.zero_grad()
            optimizer.set_backward_passes_per_step(1)
            backward(part.loss(number + 1))
            optimizer.step()
            optimizer.zero_grad()
        return [float(param.detach().sum()) for param in part.model.parameters()]

    results = on_ranks(play)
    assert results[0] == results[1]


def test_step_after_synchronize() -> None:
    """``step`` after ``synchronize`` without skip_synchronize warns, and does not reduce the gradients again."""

    def play(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1), op=ddl.Sum)
        backward(part.loss(0))
        optimizer.synchronize()
        before = [param.grad.clone() for param in part.model.parameters() if param.grad is not None]
        if part.rank == 0:  # catching warnings affects the whole process
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()
        ddl.barrier()
        if part.rank == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        after = [param.grad for param in part.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)

    on_ranks(play)


def test_a_parameter_that_no_rank_uses() -> None:
    """A parameter that no rank uses gets zeros on every rank."""

    def play(part: Part) -> None:
        optimizer = made(part)
        x, y = part.batch(0)
        backward(torch.nn.functional.mse_loss(part.model(x, use_right=False), y))
        optimizer.step()
        grad = part.model.right.weight.grad
        assert grad is not None
        assert grad.abs().sum().item() == 0.0

    on_ranks(play)


def test_add_param_group_with_a_name_that_is_taken() -> None:
    """A parameter name that is taken already is refused, because two gradients would share it."""

    def play(part: Part) -> None:
        bare = torch.optim.SGD([("a", part.model.body.weight)], lr=0.1)
        optimizer: Any = ddl.DistributedOptimizer(bare)
        assert list(optimizer._parameter_names.values()) == ["a"]
        with pytest.raises(ValueError, match="a is in another group already"):
            optimizer.add_param_group({"params": [("a", part.model.left.weight)]})

    on_ranks(play, size=1)


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(("groups", "requests"), [(None, 6), (1, 1), (2, 2), (4, 4), (6, 6)])
def test_groups_go_off_together(
    groups: int | None, requests: int, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six gradients are sent in as many requests as there are groups, while backward runs or at its end."""
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(part: Part) -> tuple[int, bool]:
        optimizer = made(part, groups=groups)
        reducer = optimizer._ddl
        handles: list[Any] = []
        early: list[bool] = []
        sender, round = reducer._sender, reducer.round
        send_missing, complete = sender._send_missing, reducer._complete

        def send_missing_watched(incomplete: bool) -> None:
            early.append(bool(round.in_flight or round.attempts))
            send_missing(incomplete)

        def complete_watched() -> None:
            handles.extend([*round.in_flight, *(one.handle for one in round.attempts.values())])
            complete()

        # Gradients without a group are sent just before, with all that have arrived; only groups are counted here.
        sender._send_missing, reducer._complete = send_missing_watched, complete_watched
        backward(part.loss(0))
        assert len(handles) == 6
        optimizer.step()
        return len({id(getattr(handle, "_handle", handle)) for handle in handles}), early[0]

    assert on_ranks(play) == [(requests, overlap == "on" or groups is None)] * 2


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_is_sent_while_backward_runs(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap each gradient is sent as it arrives; without it none is, because that would take CPU cores."""
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(part: Part) -> list[int]:
        optimizer = made(part)
        sent: list[int] = []
        for param in part.model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: sent.append(len(optimizer._ddl.round.in_flight)))
        backward(part.loss(0))
        optimizer.step()
        assert not optimizer._ddl.open
        return sent

    assert on_ranks(play) == [[1, 2, 3, 4, 5, 6] if overlap == "on" else [0] * 6] * 2


def test_a_gradient_taken_away_before_the_end_of_backward_counts_as_zeros() -> None:
    """If a hook of the program removes a gradient on one rank before it is sent, the rank sends zeros."""

    def play(part: Part) -> list[float]:
        optimizer = made(part)

        def take_away(param: torch.Tensor) -> None:
            param.grad = None

        if part.rank == 1:
            part.model.body.weight.register_post_accumulate_grad_hook(take_away)
        for number in range(4):
            optimizer.zero_grad()
            backward(part.loss(number))
            optimizer.step()
        return [float(param.detach().sum()) for param in part.model.parameters()]

    results = on_ranks(play)
    assert results[0] == results[1]


def test_ranks_with_different_parameters_in_groups() -> None:
    """A rank whose parameters differ from those of the first rank raises an error that names them."""

    def play(part: Part) -> None:
        params = list(part.model.named_parameters())
        if part.rank == 1:
            params[0] = ("other", params[0][1])
            with pytest.raises(ValueError, match=r"different parameters: gradient\.body\.weight, gradient\.other"):
                made(part, named_parameters=params, groups=2)
        else:
            made(part, named_parameters=params, groups=2)

    on_ranks(play)


def test_a_mismatch_ends_no_job() -> None:
    """Parameters of different shapes raise an error; all others are reduced, and the job goes on."""

    def play(part: Part) -> float:
        odd = torch.nn.Parameter(torch.ones(2 + part.rank, dtype=torch.float64))
        bare = torch.optim.SGD([odd, part.model.body.weight], lr=0.1)
        optimizer: Any = ddl.DistributedOptimizer(bare)
        with pytest.raises(MismatchError, match=r"noname\.0\.0"):
            backward(odd.sum() + part.model.body.weight.sum() * part.rank)
        with pytest.raises(MismatchError, match=r"noname\.0\.0"):
            optimizer.step()  # it would step on gradients that are not reduced
        grad = part.model.body.weight.grad
        assert grad is not None
        assert grad.unique().tolist() == [0.5]
        return float(ddl.allreduce(torch.ones(1)))

    assert on_ranks(play) == [1.0, 1.0]


def test_it_goes_on_in_the_next_job() -> None:
    """After shutdown and another init, a wrapped optimizer belongs to the new world, whatever its size."""
    before: Any = {}

    def first(part: Part) -> None:
        optimizer = made(part)
        step(part, optimizer)
        before[part.rank] = (part, optimizer)

    on_ranks(first)

    def second(rank: int, job: Any) -> list[float]:
        part, optimizer = before[rank]
        for number in range(3):
            step(part, optimizer, number)
        return [float(param.detach().sum()) for param in part.model.parameters()]

    results = run_world(2, second)
    assert results[0] == results[1]
    part, optimizer = before[0]
    (alone,) = local_jobs(1, backend="auto")
    alone.start()
    with api.use_job(alone):
        for number in range(3):
            step(part, optimizer, number)
    alone.shutdown()
    with pytest.raises(NotInitialized):
        step(part, optimizer)
    results = run_world(2, second)
    assert results[0] != results[1], "rank 0 had trained alone"


def test_shutdown_between_backward_and_step() -> None:
    """A step after shutdown uses the gradients that backward has reduced; another backward raises."""

    def play(rank: int, job: Any) -> list[float]:
        part = Part(rank, 2)
        optimizer = made(part)
        backward(part.loss(0))
        ddl.barrier()
        job.shutdown()
        optimizer.step()
        with pytest.raises(NotInitialized):
            backward(part.loss(1))
        return [float(param.detach().sum()) for param in part.model.parameters()]

    results = run_world(2, play)
    assert results[0] == results[1]


def test_a_parameter_that_grows_rows_is_reduced_whole() -> None:
    """A gradient with the strides of the last one and another shape is reduced completely."""

    def play(part: Part) -> None:
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], op=ddl.Sum)
        for rows in [3] * 8 + [6] * 8 + [2] * 8:
            weight.data = torch.zeros(rows, 4)
            weight.grad = None
            (weight * (part.rank + 1)).sum().backward()
            optimizer.step()
            assert weight.shape == (rows, 4)
            assert (weight == -3).all(), f"{rows} rows: {weight}"

    on_ranks(play)
