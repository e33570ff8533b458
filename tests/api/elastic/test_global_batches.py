"""Global batches: each sample once in an epoch whatever the ranks do, and step k has the same samples on any number of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.api import Share
from ddlcore.api.elastic import GlobalBatchSampler, global_batches
from ddlcore.errors import InvalidArgument
from tests.runtime.effort import examples


class Ranks:
    """The place in the world that samplers are told: any rank of any number, without a world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        monkeypatch.setattr(global_batches, "rank", lambda: self.rank)
        monkeypatch.setattr(global_batches, "size", lambda: self.size)

    def at(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture(scope="module")
def ranks() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Ranks(monkeypatch)


def drawn(ranks: Ranks, sampler: GlobalBatchSampler, size: int, batches: int) -> list[list[int]]:
    """What the ranks of a world of ``size`` use in the next batches: the rows of each batch that count."""
    used: list[list[int]] = [[] for _ in range(batches)]
    for rank in range(size):
        ranks.at(rank, size)
        own = [*sampler]
        assert len(own) == len(sampler), "all ranks get equally many batches"
        for number in range(batches):
            share = sampler.share(number)
            assert own[number], "no rank gets an empty batch"
            assert share.rows in (0, len(own[number]))
            assert share.size == size
            used[number] += own[number][: int(share.rows)]
    ranks.at(0, size)
    for number in range(batches):
        assert sampler.share(number).total == len(used[number])
    return used


@examples(150)
@given(st.integers(1, 60), st.integers(1, 20), st.booleans(), st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4))))
def test_each_sample_once_whatever_happens_to_the_world(
    ranks: Ranks, length: int, batch: int, shuffle: bool, worlds: list[tuple[int, int]]
) -> None:
    """Worlds of random sizes apply a few steps each: the steps are those of one undisturbed rank, sample by sample."""
    sampler = GlobalBatchSampler(length, batch, shuffle, seed=3)
    ranks.at(0, 1)
    alone = [*GlobalBatchSampler(range(length), batch, shuffle, seed=3)]
    steps: list[list[int]] = []
    for size, asked in [*worlds, (1, length)]:
        applied = min(asked, len(sampler))
        steps += drawn(ranks, sampler, size, len(sampler))[:applied]
        if applied:
            sampler.record_batch(applied)
        fresh = GlobalBatchSampler(length, batch, shuffle, seed=3)
        fresh.load_state_dict(sampler.state_dict())
        sampler = fresh  # a rank that joins begins so
    assert steps == alone
    assert sorted(row for step in steps for row in step) == list(range(length))
    assert len(sampler) == 0 and [*sampler] == []


def test_uneven_blocks(ranks: Ranks) -> None:
    """The first ranks get one row more; one without a row gets a row that counts nothing."""
    sampler = GlobalBatchSampler(8, 5, shuffle=False)
    dealt = []
    for rank in range(4):
        ranks.at(rank, 4)
        dealt.append([*sampler])
    assert dealt == [[[0, 1], [5]], [[2], [6]], [[3], [7]], [[4], [5]]]
    assert (sampler.share(0), sampler.share(1)) == (Share(1, 5, 4), Share(0, 3, 4))


def test_what_is_left_out(ranks: Ranks) -> None:
    """drop_last leaves out the rest of an epoch, each epoch has another order, and the position moves by what is recorded."""
    ranks.at(0, 1)
    sampler = GlobalBatchSampler(10, 4, seed=1, drop_last=True)
    first = [*sampler]
    assert [len(batch) for batch in first] == [4, 4]
    assert len(sampler) == 2, "drawing moves nothing"
    sampler.record_batch()
    assert [*sampler] == first[1:]
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
    assert [*copy.deepcopy(sampler)] == first[1:]
    sampler.set_epoch(1)
    assert len(sampler) == 2 and [*sampler] != first
    assert [*GlobalBatchSampler(10, 4, seed=2, drop_last=True)] != first


def test_wrong_use_is_told(ranks: Ranks) -> None:
    """Sizes that make no batch, and records and shares beyond the end of an epoch."""
    ranks.at(0, 1)
    for batch in (0, -1, True, 2.0):
        with pytest.raises(InvalidArgument, match="global_batch="):
            GlobalBatchSampler(8, batch)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="this one has none"):
        GlobalBatchSampler([], 4)
    with pytest.raises(InvalidArgument, match="leaves nothing of 3 samples"):
        GlobalBatchSampler(3, 4, drop_last=True)
    sampler = GlobalBatchSampler(8, 4)
    for batches in (0, 3):
        with pytest.raises(InvalidArgument, match="2 batches of epoch 0 are not recorded"):
            sampler.record_batch(batches)
    sampler.record_batch(2)
    with pytest.raises(InvalidArgument, match=r"epoch 0 has no further batch.*set_epoch"):
        sampler.share()
