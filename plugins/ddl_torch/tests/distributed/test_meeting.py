"""How the ranks of a world meet by a store in which earlier meetings have left their keys."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ddl_torch.distributed.meeting import Steps, StoreMeeting, following, leading, meet

from ddlcore.errors import DeadlineExceeded


class Attempt:
    """One meeting. Its ranks begin and go on in a random order; they may all be stopped before they have met."""

    def __init__(self, chance: random.Random, store: Any, hosts: list[str]) -> None:
        self._chance, self._store, self._hosts = chance, store, hosts
        self._running: dict[int, Steps] = {}
        self.met: dict[int, StoreMeeting] = {}

    def go_on(self) -> None:
        """Let one rank that has not met the others begin, or look into the store once more."""
        rank = self._chance.choice([rank for rank in range(len(self._hosts)) if rank not in self.met])
        host = self._hosts[rank]
        if rank not in self._running:
            store = self._store
            self._running[rank] = leading(store, len(self._hosts), host) if rank == 0 else following(store, rank, host)
        try:
            next(self._running[rank])
        except StopIteration as ended:
            self.met[rank] = ended.value

    @property
    def over(self) -> bool:
        return len(self.met) == len(self._hosts)


def test_no_rank_believes_what_earlier_meetings_have_left() -> None:
    """After attempts that end at any moment, all ranks of the last one agree, on a name that none has had before."""
    for seed in range(300):
        _attempts(random.Random(seed))


def _attempts(chance: random.Random) -> None:
    store, names = dist.HashStore(), set[str]()
    for last in (*[False] * chance.randrange(4), True):
        hosts = chance.choice((["a", "a", "a"], ["a", "b", "a"], ["a", "a"], ["b", "a"]))
        attempt = Attempt(chance, store, hosts)
        patience = 500 if last else chance.randrange(30)
        while not attempt.over and patience:
            attempt.go_on()
            patience -= 1
        met = attempt.met.values()
        assert attempt.over or not last
        assert len({one.name for one in met}) <= 1 and names.isdisjoint(one.name for one in met)
        assert all(one.on_one_host == (len(set(hosts)) == 1) for one in met)
        names.update(one.name for one in met)


@pytest.mark.parametrize(("rank", "named"), [(0, "ranks 1, 2 did"), (2, "rank 0 did")])
def test_the_error_names_who_has_not_come(rank: int, named: str) -> None:
    with pytest.raises(DeadlineExceeded, match=f"{named} not come to the meeting within 0.1 s"):
        meet(dist.HashStore(), rank, 3, timedelta(seconds=0.1))


def test_a_rank_alone_meets_nobody() -> None:
    first, second = (meet(dist.HashStore(), 0, 1, timedelta(seconds=1)) for _ in range(2))
    assert first.on_one_host and first.name != second.name
