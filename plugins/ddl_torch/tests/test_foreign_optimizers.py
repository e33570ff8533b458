"""Optimizers that never called torch's constructor, or are no torch optimizers, train like any other."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_torch import elastic, replicas

from ddlcore.errors import ReplicasDiffer
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import STEPS, Network, Part, agree, parameters


class Bare(torch.optim.Optimizer):
    """A Lookahead as authors of papers publish it: it does not call torch's constructor, and has only what it uses itself."""

    def __init__(self, optimizer: Any, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.k, self.alpha = k, alpha

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] = group.get("counter", 0) + 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if group["counter"] % self.k == 0:
                    slow.add_(param.detach() - slow, alpha=self.alpha)
                    param.data.copy_(slow)
        return loss


class Published(Bare):
    """A Lookahead with methods for its state. The keys of the state are ids, so a checkpoint loses the slow weights."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.defaults = optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        slow = {(id(key) if isinstance(key, torch.Tensor) else key): one for key, one in self.state.items()}
        return {"fast_state": fast["state"], "slow_state": slow, "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["slow_state"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.param_groups = self.optimizer.param_groups


class Plain:
    """A wrapper that is no torch.optim.Optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Forwarding:
    """A wrapper that has nothing of its own but ``step``."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__["inner"] = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Properties(torch.optim.Optimizer):
    """A wrapper whose groups and state are properties, as that of Accelerate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Calling(torch.optim.Adam):
    """An Adam that calls the step of Adam, which torch has given hooks too if an Adam was made anywhere."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def calling(optimizer: Any) -> Any:
    return Calling(optimizer.param_groups[0]["params"], lr=0.01)


KINDS: list[Callable[[Any], Any]] = [Bare, Published, Plain, Forwarding, Properties, calling]
EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def adam(part: Part) -> Any:
    return torch.optim.Adam(part.model.parameters(), lr=0.01)


def clear(part: Part) -> None:  # in one process torch's zero_grad fails without its constructor
    for param in part.model.parameters():
        param.grad = None


@EVERY
def test_steps_agree_with_one_process(kind: Callable[[Any], Any]) -> None:
    """Gradients are averaged once, and clipping between backward and step sees the averages."""

    def train(part: Part) -> None:
        optimizer = part.wrap(kind(adam(part)))
        for step in range(STEPS):
            clear(part)
            part.loss(step).backward()
            torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)
            optimizer.step()

    agree(train)


@EVERY
@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum])
def test_closures_agree_with_one_process(kind: Callable[[Any], Any], op: int) -> None:
    """What a closure computes is reduced once, also as a sum, and also if torch calls hooks of an inner step."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(kind(adam(part)), op=op)
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                clear(part)
                loss = part.loss(step) * (2.0 if op == ddl.Sum and part.size == 1 else 1.0)
                loss.backward()
                return loss

            optimizer.step(closure)

    agree(train)


def test_a_sum_is_not_reduced_again_by_an_inner_step() -> None:
    """With SGD, unlike Adam, a second reduction of a sum would double the step."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def play(rank: int, job: Any) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # makes torch wrap SGD.step
        optimizer = ddl.DistributedOptimizer(Twice([weight], lr=1.0), op=ddl.Sum)
        counted: list[int] = []
        optimizer.register_step_post_hook(lambda *_: counted.append(1))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert counted == [1]
        return weight.item()

    assert run_world(2, play) == [-2.0, -2.0]


@EVERY
@pytest.mark.parametrize("way", ["passes", "no_sync", "weight", "synchronize"])
def test_what_the_optimizer_can_do(kind: Callable[[Any], Any], way: str) -> None:
    """Accumulation, weights and Horovod's explicit synchronization agree with one process."""

    def train(part: Part) -> None:
        every: dict[str, dict[str, Any]] = {"passes": {"backward_passes_per_step": 2}, "weight": {"weight": 1.0}}
        options = every.get(way, {})
        optimizer: Any = part.wrap(kind(adam(part)), **options)
        for step in range(0, STEPS, 2):
            clear(part) if part.size == 1 else optimizer.zero_grad()
            if way == "no_sync" and part.size > 1:
                with optimizer.no_sync():
                    part.loss(step).backward()
            else:
                part.loss(step).backward()
            part.loss(step + 1).backward()
            if way == "synchronize" and part.size > 1:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    agree(train)


@EVERY
def test_a_rank_without_a_backward_takes_part(kind: Callable[[Any], Any]) -> None:
    """Only ``step`` can reduce there, so the hook before it must run."""

    def play(rank: int, job: Any) -> list[torch.Tensor]:
        part = Part(rank, 2)
        optimizer = part.wrap(kind(adam(part)))
        if rank:
            part.loss(0).backward()
        optimizer.step()
        return parameters(part.model)

    one, other = run_world(2, play)
    assert all(map(torch.equal, one, other))


@EVERY
def test_an_outer_optimizer_around_ours(kind: Callable[[Any], Any]) -> None:
    def train(part: Part) -> None:
        if kind is calling:
            pytest.skip("makes an optimizer, and wraps none")
        optimizer = kind(part.wrap(adam(part)))
        for step in range(STEPS):
            clear(part)
            part.loss(step).backward()
            optimizer.step()
        if part.size > 1:
            with pytest.raises(ValueError, match="wrap each optimizer once"):
                part.wrap(optimizer)

    agree(train)


@EVERY
def test_a_state_is_broadcast(kind: Callable[[Any], Any]) -> None:
    """Ranks go on alike after rank 0's state was sent, also if the optimizer's own code restores a part only."""

    def play(rank: int, job: Any) -> list[torch.Tensor]:
        part = Part(rank, 2)
        if rank == 0:
            alone = kind(adam(part))
            for step in range(4):
                clear(part)
                part.loss(step).backward()
                alone.step()
            optimizer: Any = ddl.DistributedOptimizer(alone, part.model.named_parameters())
        else:
            optimizer = part.wrap(kind(adam(part)))
        ddl.broadcast_parameters(part.model.state_dict(), 0)
        ddl.broadcast_optimizer_state(optimizer, 0)
        for step in range(5):
            optimizer.zero_grad()
            part.loss(step).backward()
            optimizer.step()
        return parameters(part.model)

    one, other = run_world(2, play)
    assert all(map(torch.equal, one, other))


@EVERY
def test_a_state_dict_is_restored(kind: Callable[[Any], Any]) -> None:
    """A loaded state continues the training, and groups remain those of the inner optimizer."""

    def play(rank: int, job: Any) -> float:
        part = Part(rank, 2)
        optimizer: Any = part.wrap(kind(adam(part)))

        def steps(numbers: range) -> list[torch.Tensor]:
            for step in numbers:
                optimizer.zero_grad()
                part.loss(step).backward()
                optimizer.step()
            return parameters(part.model)

        steps(range(3))  # the third step ends with slow weights equal to the fast ones
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), part.model.state_dict()), file)
        expected = steps(range(3, 5))
        file.seek(0)
        state, weights = torch.load(file, weights_only=False)
        optimizer.load_state_dict(state)
        part.model.load_state_dict(weights)
        found = steps(range(3, 5))
        assert all(map(torch.equal, expected, found))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        steps(range(5, 6))
        return max((a - b).abs().max().item() for a, b in zip(found, parameters(part.model), strict=True))

    if kind is Published:
        pytest.skip("loses the slow weights, as without ddl")
    moved = run_world(2, play)
    # A Lookahead moves to its slow weights in this step; the others move only if the learning rate is not that of ``lr``.
    assert kind is Bare or moved == [0.0, 0.0]


@EVERY
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_bare(kind: Callable[[Any], Any], way: str) -> None:
    """A copy has the original class and can step, and does not wait for other ranks."""

    def play(rank: int, job: Any) -> None:
        part = Part(rank, 2)
        bare = kind(adam(part))
        original = type(bare)
        optimizer: Any = part.wrap(bare)
        assert optimizer is bare and isinstance(optimizer, torch.optim.Optimizer)
        part.loss(0).backward()
        optimizer.step()
        other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        assert type(other) is original
        assert not hasattr(other, "synchronize")
        if rank == 0:
            other.step()

    run_world(2, play)


@EVERY
def test_schedulers_before_and_after(kind: Callable[[Any], Any]) -> None:
    """A scheduler replaces ``step`` of the object; one made before the wrapping must not hide our hooks."""

    def train(part: Part) -> None:
        bare = kind(adam(part))
        make = torch.optim.lr_scheduler.StepLR
        before = make(bare, 2) if isinstance(bare, torch.optim.Optimizer) else None
        optimizer = part.wrap(bare)
        scheduler = before or (make(optimizer, 2) if part.size > 1 else make(bare.inner, 2))
        for step in range(STEPS):
            clear(part)
            if step % 2 == 0 or part.size == 1 or part.rank == 0:
                loss = part.loss(step)
                if step % 2:  # rank 1 computes nothing in this step
                    loss = torch.nn.functional.mse_loss(part.model(part.batch(step)[0][:4]), part.batch(step)[1][:4])
                    loss = loss / (2.0 if part.size == 1 else 1.0)
                loss.backward()
            optimizer.step()
            scheduler.step()

    agree(train)


@EVERY
def test_replicas_are_verified(kind: Callable[[Any], Any]) -> None:
    """The replicas are compared every 4 steps. A weight that differs is found at step 4, so each step is counted once."""

    def play(rank: int, job: Any) -> tuple[int, str]:
        model = Network(torch.float32)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer: Any = ddl.DistributedOptimizer(kind(adam), model.named_parameters())

        def train() -> None:
            for step in range(1, 100):
                if rank == 1 and step == 4:
                    model.left.weight.data[1, 3] += 1
                optimizer.zero_grad()
                model(torch.ones(4, 6)).square().mean().backward()
                optimizer.step()

        with pytest.raises(ReplicasDiffer) as info:
            train()
        return info.value.step, info.value.tensor

    settings: dict[str, object] = {"verify_every": 4, "leave_timeout_s": 30.0}
    assert run_world(2, play, settings=settings, deadline_s=60) == [(4, "left.weight (float32 3x8)")] * 2


@pytest.mark.parametrize("around", [False, True], ids=["ours outside", "ours inside"])
@EVERY
def test_elastic_states_count_steps(kind: Callable[[Any], Any], around: bool) -> None:
    """``steps`` counts each step of the outer optimizer once, also if the state has the inner one as well."""

    def play(rank: int, job: Any) -> tuple[int, bool]:
        part = Part(rank, 2)
        first = adam(part)
        optimizer: Any = kind(part.wrap(first)) if around and kind is not calling else part.wrap(kind(first))
        inner = {} if kind is calling else {"inner": first}
        state = elastic.TorchState(part.model, optimizer, **inner)
        for step in range(3):
            optimizer.zero_grad()
            part.loss(step).backward()
            optimizer.step()
        return state.steps, "optimizer" in state._handled

    assert run_world(2, play) == [(3, True)] * 2


def test_other_objects_of_the_class_are_not_changed() -> None:
    """Torch would wrap ``step`` of the class, and then every object without torch's constructor would fail."""

    def play(rank: int, job: Any) -> None:
        part, other = Part(rank, 2), Part(0, 1)
        part.wrap(Bare(adam(part)))
        alone = Bare(adam(other))
        other.loss(0).backward()
        alone.step()
        assert type(alone) is Bare and not hasattr(Bare.step, "hooked")

    run_world(2, play)


def test_lbfgs_inside_another_optimizer_reduces_its_loss() -> None:
    """The steps of L-BFGS depend on the loss, wherever it is."""

    def train(part: Part) -> None:
        bare = torch.optim.LBFGS(part.model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        optimizer: Any = part.wrap(Plain(bare))  # type: ignore[arg-type]
        for _ in range(3):

            def closure() -> torch.Tensor:
                clear(part)
                loss = part.loss(0)
                loss.backward()
                return loss

            optimizer.step(closure)
        if part.size > 1:
            with pytest.raises(ValueError, match="LBFGS"):
                ddl.broadcast_optimizer_state(optimizer, 0)
            with pytest.raises(ValueError, match="L-BFGS"):
                ddl.DistributedOptimizer(Plain(torch.optim.LBFGS(part.model.parameters())), weight=1)  # type: ignore[type-var]
            with pytest.raises(ValueError, match="L-BFGS"):
                elastic.TorchState(part.model, optimizer)

    agree(train, tolerance=1e-9)


def test_what_a_wrapper_passes_on_is_still_passed_on() -> None:
    """Torch's methods do not replace those that a wrapper gets from its inner optimizer by ``__getattr__``."""

    def play(rank: int, job: Any) -> None:
        part = Part(rank, 2)
        inner = adam(part)
        optimizer: Any = ddl.DistributedOptimizer(Forwarding(inner))  # type: ignore[type-var]
        added: list[Any] = []

        def add(group: Any) -> None:
            added.append(group)
            torch.optim.Adam.add_param_group(inner, group)

        inner.add_param_group = add
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        assert len(added) == 1 and len(optimizer.param_groups) == 2
        assert optimizer.state_dict().keys() == inner.state_dict().keys()

    run_world(2, play)


def test_an_inner_optimizer_is_not_taken_for_one_that_nobody_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's global hook sees its steps, but its gradients are reduced, so nothing is to be compared."""
    made: list[str] = []
    verifier: Any = vars(replicas)["Verifier"]

    def recorded(name: str, *args: Any, **options: Any) -> Any:
        made.append(name)
        return verifier(name, *args, **options)

    monkeypatch.setattr(replicas, "Verifier", recorded)

    def play(rank: int, job: Any) -> None:
        part = Part(rank, 2)
        optimizer = part.wrap(Plain(adam(part)))  # type: ignore[arg-type]
        part.loss(0).backward()
        optimizer.step()

    run_world(2, play)
    assert made == ["DistributedOptimizer(Plain)"] * 2
