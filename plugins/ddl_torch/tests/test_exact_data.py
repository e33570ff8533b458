"""Global batches with weights while ranks die and join at random: the parameters are those of one undisturbed process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_torch import elastic
from torch.utils.data import DataLoader, TensorDataset

from plugins.ddl_torch.tests.training import Network, differences, parameters
from tests.api.elastic.threads import ElasticThreads, Killed

pytestmark = pytest.mark.timeout(240)

ROWS, BATCH, EPOCHS = 53, 7, 3
DATA = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TOKENS = torch.randint(1, 9, (ROWS, 1), generator=torch.Generator().manual_seed(6)).double()


def loss_of(model: Any, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of these rows, where each row has so many equal tokens as ``tokens`` says."""
    each = (model(rows[:, :6]) - rows[:, 6:]).square()
    loss: torch.Tensor = (each * tokens).sum() / tokens.sum()
    return loss


def undisturbed(by_token: bool) -> list[torch.Tensor]:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = elastic.GlobalBatchSampler(ROWS, BATCH, seed=4)
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        rest = order._after(0)
        for at in range(0, ROWS, BATCH):
            rows = rest[at : at + BATCH]
            optimizer.zero_grad()
            tokens = TOKENS[rows] if by_token else torch.ones(len(rows), 1, dtype=torch.float64)
            torch.autograd.backward(loss_of(model, DATA[rows], tokens))
            optimizer.step()
    return parameters(model)


def trained(deaths: set[tuple[int, int]], by_token: bool) -> Callable[[int], Any]:
    """Return what a thread does: it trains, and dies at each (place, step) of ``deaths`` once, at different moments."""
    lock = threading.Lock()

    def dies(place: int, step: int, moment: int) -> bool:
        with lock:
            if (place, step) not in deaths or (place + step) % 3 != moment:
                return False
            deaths.remove((place, step))
            return True

    def play(place: int) -> Any:
        model = Network()
        sampler = elastic.GlobalBatchSampler(ROWS, BATCH, seed=4)
        bare = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        weight: Any = 1 if by_token else sampler.share
        optimizer: Any = ddl.DistributedOptimizer(bare, model.named_parameters(), weight=weight)

        @elastic.run
        def train(state: Any) -> tuple[int, list[torch.Tensor]]:
            while state.sampler.epoch < EPOCHS:
                for rows, tokens in DataLoader(TensorDataset(DATA, TOKENS), batch_sampler=state.sampler):
                    state.optimizer.zero_grad()
                    if by_token:
                        has_rows = state.sampler.share().rows > 0
                        state.optimizer.weight = tokens.sum() if has_rows else 0
                    loss = loss_of(state.model, rows, tokens if by_token else torch.ones_like(tokens))
                    if dies(place, state.steps, 0):
                        raise Killed(again=True)
                    torch.autograd.backward(loss)
                    if dies(place, state.steps, 1):
                        raise Killed(again=True)
                    state.optimizer.step()
                    state.sampler.record_batch()
                    if dies(place, state.steps, 2):
                        raise Killed(again=True)
                    state.commit()
                state.sampler.set_epoch(state.sampler.epoch + 1)
            return state.steps, parameters(state.model)

        return train(elastic.TorchState(model, optimizer, sampler=sampler))

    return play


@pytest.mark.parametrize("by_token", [False, True], ids=["shares", "tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_die_and_come_again(seed: int, by_token: bool) -> None:
    """Place 0 lives, so that somebody always has the state; 2 to 4 ranks, so some batches have a rank without a row."""
    chance = random.Random(10 * seed + by_token)
    size, steps = 2 + seed, EPOCHS * -(-ROWS // BATCH)
    deaths = {(place, step) for place in range(1, size) for step in range(steps) if chance.random() < 0.08}
    deaths.add((1, 2))
    world = ElasticThreads(size, trained(deaths, by_token))
    results = world.play()
    assert world.deaths > 0
    expected = undisturbed(by_token)
    done = {place: result for place, result in results.items() if not isinstance(result, SystemExit)}
    assert 0 in done
    for place, result in done.items():
        assert not isinstance(result, BaseException), (place, result)
        count, found = result
        assert count == steps
        assert differences(expected, found) <= 1e-10, place
