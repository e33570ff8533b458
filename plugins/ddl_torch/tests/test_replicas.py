"""The ranks' parameters are compared after steps, and planted faults are found with their tensor, ranks and step."""

from __future__ import annotations

import gc
import logging
import re
import time
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch import nn

from ddlcore import api
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.launching import PROGRAMS, launch
from plugins.ddl_torch.tests.training import Network

PATIENT: dict[str, object] = {"leave_timeout_s": 30.0, "start_timeout_s": 30.0, "open_timeout_s": 30.0}
WAITS = {"DDL_LEAVE_TIMEOUT_S": "60"}
Plant = Callable[[int, int, Network], None]  # a fault to apply to a rank's model before a step (the first is 1)


def train(rank: int, plant: Plant, steps: int) -> Network:
    """Train for ``steps`` steps; 0: until an error is raised, which stops every rank."""
    model = Network(torch.float32)
    optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    random = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1) if steps else count(1):
        plant(rank, step, model)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=random)).square().mean().backward()
        optimizer.step()
    ddl.shutdown()
    return model


def trained(plant: Plant, steps: int, size: int = 3, **settings: object) -> list[Network]:
    """Return the models of all ranks."""
    return run_world(
        size, lambda rank, job: train(rank, plant, steps), settings={**PATIENT, **settings}, deadline_s=100
    )


def found(plant: Plant, steps: int = 0, size: int = 3, **settings: object) -> list[ddl.ReplicasDiffer]:
    """Return the error that each rank raised."""

    def rank(rank: int, job: api.Job) -> ddl.ReplicasDiffer:
        with pytest.raises(ddl.ReplicasDiffer) as info:
            train(rank, plant, steps)
        return info.value

    errors = run_world(size, rank, settings={"verify_every": 2, **PATIENT, **settings}, deadline_s=100)
    assert len({(e.tensor, e.groups, e.step, e.agreed_step) for e in errors}) == 1
    return errors


def flips_a_bit(rank: int, step: int, model: Network) -> None:
    if rank == 1 and step == 6:
        model.left.weight.data.view(torch.int32)[1, 3] ^= 1


def test_a_flipped_bit_is_found() -> None:
    """If the lowest bit of one element flips on one rank, every rank raises and names tensor, rank and step."""
    error = found(flips_a_bit)[0]
    assert (error.tensor, error.groups) == ("left.weight (float32 3x8)", ((0, 2), (1,)))
    assert (error.step, error.agreed_step) == (6, 4)
    assert "rank 1 is alone: if it is alone again" in str(error)


def test_a_flipped_bit_of_the_last_step_is_found() -> None:
    """``shutdown`` waits for the last comparison and raises; the error states how far the values are apart."""
    errors = found(flips_a_bit, steps=6)
    assert (errors[0].step, errors[0].agreed_step) == (6, 4)
    assert all(0 < error.distances[1] < 1e-5 for error in errors)


def test_noise_on_one_rank_is_found() -> None:
    """Noise on one rank is found in the step in which it begins."""

    def noisy(rank: int, step: int, model: Network) -> None:
        if rank == 0 and step >= 5:
            model.body.bias.data += 1e-6

    error = found(noisy, size=2)[0]
    assert (error.tensor, error.groups, error.step, error.agreed_step) == (
        "body.bias (float32 8)", ((0,), (1,)), 6, 4,
    )  # fmt: skip


def test_a_forgotten_broadcast_is_found_at_the_first_step() -> None:
    """With ``verify_every`` the first step is compared too, and the message says that the broadcast was forgotten."""

    def unsent(rank: int, step: int, model: Network) -> None:
        if step == 1:
            model.right.weight.data += rank

    error = found(unsent, verify_every=1000)[0]
    assert (error.tensor, error.groups, error.step, error.agreed_step) == (
        "right.weight (float32 3x8)", ((0,), (1,), (2,)), 1, -1,
    )  # fmt: skip
    assert "ddl.broadcast_parameters(model.state_dict(), root_rank=0)" in str(error)


def test_equal_ranks_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A correct training under ``verify_every=1`` gives the same bits, warns of nothing and is replayed."""

    def nothing(rank: int, step: int, model: Network) -> None:
        pass

    with caplog.at_level(logging.WARNING, "ddl"):
        checked, unchecked = (trained(nothing, steps=20, verify_every=every) for every in (1, 0))
    assert not [record for record in caplog.records if "parameters differ" in record.message]
    for one, other in zip(checked, unchecked, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_check_is_one_message_and_leaves_replay_alone() -> None:
    """Under ``verify_every=1`` steps are replayed; each sends one message to the coordinator and gets no answer."""
    steps = 40

    def rank(rank: int, job: api.Job) -> ddl.Stats:
        model = Network(torch.float32)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        return ddl.stats()

    for stats in run_world(2, rank, settings={"verify_every": 1, **PATIENT}, deadline_s=100):
        assert stats["buckets_replayed"] > 0
        assert 0 < stats["pulse_messages"] <= steps


def test_who_has_joined_is_not_waited_for() -> None:
    """Ranks with more data go on after another rank has joined, are compared with each other, and do not hang."""

    def rank(rank: int, job: api.Job) -> None:
        model = Network(torch.float32)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(3 if rank == 0 else 6):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        ddl.join()
        ddl.shutdown()

    run_world(3, rank, settings={"verify_every": 1, **PATIENT}, deadline_s=100)


def test_ranks_outside_the_process_set_are_not_compared() -> None:
    """Two halves of the world may train different models, each with its own process set."""

    def rank(rank: int, job: api.Job) -> None:
        halves = [ddl.add_process_set([0, 1]), ddl.add_process_set([2, 3])]
        model = Network(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank // 2)
        optimizer = ddl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=halves[rank // 2]
        )
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        ddl.verify(model, halves[rank // 2])
        with pytest.raises(ddl.ReplicasDiffer):
            ddl.verify(model)
        ddl.shutdown()

    run_world(4, rank, settings={"verify_every": 1, **PATIENT}, deadline_s=100)


def test_verify_takes_what_holds_parameters() -> None:
    """``verify`` takes a module (without its buffers), an optimizer, a state dict, pairs or tensors, of any layout."""

    def rank(rank: int, job: api.Job) -> None:
        torch_model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            for parameter in torch_model.parameters():
                parameter.fill_(0.5)
        torch_model.get_submodule("1").register_buffer("running_mean", torch.full((3,), float(rank)))
        ddl.verify(torch_model)
        optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.1)
        ddl.verify(optimizer)
        ddl.verify(ddl.DistributedOptimizer(optimizer, torch_model.named_parameters()))
        with pytest.raises(ddl.ReplicasDiffer) as info:
            ddl.verify(torch_model.state_dict())
        assert info.value.tensor == "1.running_mean (float32 3)"
        assert info.value.distances == {1: 1.0}
        grid = torch.arange(48.0).reshape(1, 2, 4, 6)
        ddl.verify([grid if rank else grid.contiguous(memory_format=torch.channels_last), grid.to(torch.bfloat16)])
        with pytest.raises(ddl.ReplicasDiffer) as info:
            ddl.verify([("half", torch.tensor([1.0 + rank], dtype=torch.bfloat16))])
        assert info.value.distances == {1: 1.0}
        with pytest.raises(ValueError, match="is no tensor"):
            ddl.verify([("text", "no tensor")])

    run_world(2, rank, settings=PATIENT, deadline_s=100)


def test_the_job_keeps_no_model() -> None:
    """When an optimizer is deleted, its parameters are freed although its job goes on."""

    def rank(rank: int, job: api.Job) -> Any:
        model = Network(torch.float32)
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        held = weakref.ref(model.body.weight)
        del model, optimizer
        deadline_s = time.monotonic() + 60
        while (
            held() is not None and time.monotonic() < deadline_s
        ):  # a garbage collection does nothing while another rank's runs
            gc.collect()
            time.sleep(0.01)
        return held() is None

    assert all(run_world(2, rank, settings={"verify_every": 1, **PATIENT}, deadline_s=100))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_difference_behind_the_last_step_fails_the_run() -> None:
    """If a difference is found after the scripts have ended, `ddl run` exits with 1 and prints the reason."""
    with pytest.raises(AssertionError, match="ended with 1:") as info:
        launch(2, PROGRAMS / "replicas.py", "last", timeout_s=200, env={"DDL_VERIFY_EVERY": "5", **WAITS})
    shown = str(info.value)
    assert shown.count("trained to the end") == 2, shown
    (line,) = re.findall(r"(?m)^ddl run: the ranks' parameters differ.*$", shown)
    assert "after its step 10" in line, shown
    assert "bias (float32 2)" in line, shown


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_what_was_forgotten_is_a_warning_at_the_first_step() -> None:
    """With default settings rank 0 warns once of a model that was not broadcast and of a bare optimizer.

    The job goes on.
    """
    shown = launch(2, PROGRAMS / "replicas.py", "forgotten", timeout_s=200)
    assert shown.count("trained to the end") == 2, shown
    first, second = sorted(
        re.findall(r"\[0\] WARNING ddl: the ranks' parameters differ \((of .*?), after its step 1\)", shown)
    )
    assert (first, second) == ("of Adam (a bare optimizer)", "of DistributedOptimizer(SGD)"), shown
    assert shown.count("what next: call ddl.broadcast_parameters(") == 1, shown
    assert shown.count("what next: this optimizer is not a DistributedOptimizer") == 1, shown


def test_the_first_comparison_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    """With ``verify_first_step=0`` there is no warning about ranks that differ."""

    def unsent(rank: int, step: int, model: Network) -> None:
        if step == 1:
            model.right.weight.data += rank

    for wanted in (True, False):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ddl"):
            trained(unsent, steps=3, size=2, verify_first_step=wanted)
        assert ("parameters differ" in caplog.text) is wanted
