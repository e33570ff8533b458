"""An interrupt at any moment of a backward pass or of its end: the step goes on exactly, or ranks raise named errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_torch.reducer import UnfinishedBackward
from ddl_torch.rounds import Round

from ddlcore.errors import NotInitialized
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import STEPS, Part, agree, backward, failing_at

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(params=["on", "off"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DDL_OVERLAP", request.param)
    return str(request.param)


def interrupting_first(method: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    """Return ``method`` such that its first call ends at once, as if a signal's handler had raised there."""

    def interrupted(*args: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        method(*args)

    return interrupted


def backward_with_interrupt_at_its_end(optimizer: Any, loss: torch.Tensor) -> None:
    """Run ``backward()`` so that an interrupt keeps ddl from noting that the pass has ended."""
    passes = optimizer._ddl.passes
    passes._end = interrupting_first(passes._end, [])
    with pytest.raises(KeyboardInterrupt):
        backward(loss)
    del passes._end


def test_an_interrupt_just_as_a_pass_has_ended(overlap: str) -> None:
    """The step goes on exactly, as all gradients are there: nobody raises IncompleteGradients or MismatchError."""

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            if part.size > 1 and part.rank == step % 2:
                backward_with_interrupt_at_its_end(optimizer, part.loss(step))
                optimizer.synchronize()
            else:
                backward(part.loss(step))
            optimizer.step()

    agree(train)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_failed_pass_is_noted(overlap: str) -> None:
    """Python drops the exception, but not the failure: the step is skipped as after any failed backward."""

    def train(part: Part) -> None:
        now = {"step": -1}
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        failing_at(part.model.body.weight, lambda: now["step"] in (2, 6))
        for step in range(STEPS):
            now["step"] = step
            optimizer.zero_grad()
            calls: list[int] = []
            if part.size > 1:
                passes = optimizer._ddl.passes
                passes._give_up = interrupting_first(type(passes)._give_up.__get__(passes), calls)
            try:
                backward(part.loss(step))
            except ArithmeticError:
                if part.size > 1 and overlap == "on":
                    with pytest.raises(ddl.IncompleteGradients, match=r"call optimizer.zero_grad\(\)"):
                        optimizer.synchronize()
                elif part.size > 1:
                    with pytest.raises(ddl.IncompleteGradients, match=r"call optimizer.zero_grad\(\)"):
                        optimizer.step()
                assert part.size == 1 or len(calls) == 2
                continue
            optimizer.step()

    agree(train)


def test_an_interrupt_while_a_round_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round of a step keeps its own names where an interrupt strikes between two parameters' exchange of requests."""
    monkeypatch.setenv("DDL_OVERLAP", "off")

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(2):  # a second pass adds to the first one's gradients, which are reduced
                struck = part.size > 1 and part.rank == step % 2 and number == 1
                if struck:
                    optimizer._ddl.round.begin = half_begun(optimizer._ddl.round)
                try:
                    backward(part.loss(10 * step + number))
                except KeyboardInterrupt:
                    assert struck
                    optimizer.synchronize()
            optimizer.step()

    def half_begun(round: Any) -> Callable[..., None]:
        def begin(slots: list[Any]) -> None:
            del round.begin
            slots[0].change_round(round.of_step)
            raise KeyboardInterrupt

        return begin

    agree(train)


def test_another_backward_before_the_round_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt at the end of a pass, another ``backward()`` raises, and so does ``synchronize()`` then.

    The second pass has already added to a gradient. Nothing was sent, so the step can be computed again.
    """
    monkeypatch.setenv("DDL_OVERLAP", "off")

    def train(part: Part) -> None:
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            if part.size > 1 and part.rank == step % 2:
                backward_with_interrupt_at_its_end(optimizer, part.loss(step))
                with pytest.raises(UnfinishedBackward, match=r"call optimizer.synchronize\(\)"):
                    backward(part.loss(step))
                for call in (optimizer.synchronize, optimizer.step, partial(backward, part.loss(step))):
                    with pytest.raises(ddl.IncompleteGradients, match=r"call optimizer.zero_grad\(\)"):
                        call()
                optimizer.zero_grad(set_to_none=step % 3 == 0)
            backward(part.loss(step))
            optimizer.step()

    agree(train)


def test_another_backward_while_some_gradients_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If gradients of an interrupted pass are missing, another ``backward()`` makes the step fail on every rank."""
    monkeypatch.setenv("DDL_OVERLAP", "on")

    def play(rank: int, job: Any) -> str:
        part = Part(rank, 2)
        now = {"fails": False}
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        failing_at(part.model.body.weight, lambda: now["fails"])
        for step in range(STEPS):  # gradients are replayed then
            optimizer.zero_grad()
            backward(part.loss(step))
            optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            with pytest.raises(ddl.MismatchError, match="did not come to its end"):
                backward(part.loss(0))
        else:
            now["fails"] = True
            with pytest.raises(ArithmeticError):
                backward(part.loss(0))
            now["fails"] = False
            with pytest.raises(UnfinishedBackward, match=r"call optimizer.synchronize\(\)"):
                backward(part.loss(0))
            with pytest.raises(ddl.IncompleteGradients):
                optimizer.synchronize()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step))
            optimizer.step()
        return "trained on"

    assert run_world(2, play) == ["trained on"] * 2


def test_another_backward_while_all_gradients_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all gradients of an interrupted pass were sent, another ``backward()`` may spoil what peers read.

    No rank may train on then: this one leaves the job, and its peers are told why.
    """
    monkeypatch.setenv("DDL_OVERLAP", "on")

    def play(rank: int, job: Any) -> None:
        part = Part(rank, 2)
        optimizer: Any = part.wrap(torch.optim.SGD(part.model.parameters(), **SGD))
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(part.loss(step))
            optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            backward_with_interrupt_at_its_end(optimizer, part.loss(0))
            with pytest.raises(UnfinishedBackward, match="this rank has left the job"):
                backward(part.loss(0))
            for call in (optimizer.synchronize, optimizer.step):
                with pytest.raises(NotInitialized):
                    call()
            return

        def go_on() -> None:
            for step in range(STEPS):  # the gradients that rank 0 has sent may arrive before it leaves
                backward(part.loss(step))
                optimizer.step()

        with pytest.raises(ddl.PeerLost, match=r"call optimizer.synchronize\(\) before the next backward"):
            go_on()

    run_world(2, play)


def test_a_round_that_was_half_opened_when_the_next_step_began() -> None:
    """The slots take the requests of the right round, although the count of rounds began anew in between."""

    class Exchanged:
        def __init__(self, strikes: bool) -> None:
            self.turns: list[int] = []
            self.strikes = strikes

        def change_round(self, turn: int) -> None:
            self.turns.append(turn)
            if self.strikes:
                self.strikes = False
                raise KeyboardInterrupt

    round = Round()
    slots: list[Any] = [Exchanged(False), Exchanged(True)]
    round.begin(slots)
    round.of_step = 1
    with pytest.raises(KeyboardInterrupt):
        round.begin(slots)
    round.of_step = 0
    round.begin(slots)
    assert [slot.turns[-1] for slot in slots] == [0, 0]
    assert round.name_of("x") == "x"
