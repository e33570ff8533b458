"""Large results use the memory of former ones, and never that of arrays that are still there."""

from __future__ import annotations

import gc
from typing import Any, cast

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.memory import LARGE_BYTES, Memory
from ddlcore.process.job import Job
from ddlcore.runtime.buffers import MOST_BLOCKS, MOST_BYTES, FusionBuffers
from ddlcore.testing import World
from ddlcore.types import DType


@pytest.fixture
def buffers() -> FusionBuffers:
    return FusionBuffers(cast("Any", None))  # results need no transport


def result(buffers: FusionBuffers, nbytes: int) -> Memory:
    owner = buffers.result(nbytes, DType.U8).owner
    assert isinstance(owner, Memory)
    assert owner.nbytes == nbytes
    return owner


def test_a_block_is_used_again_when_its_last_view_is_gone(buffers: FusionBuffers) -> None:
    """A view of a part keeps the whole block, also in a cycle that is not collected yet."""
    memory = result(buffers, LARGE_BYTES)
    address = memory.address
    array = NumpyAdapter().adopt(memory, (LARGE_BYTES,), DType.U8, np.zeros(1, np.uint8))
    view: list[Any] = [array[100:200]]
    view.append(view)
    del memory, array
    assert result(buffers, LARGE_BYTES).address != address
    del view
    gc.collect()
    addresses = {address}
    held = [result(buffers, LARGE_BYTES) for _ in range(2)]  # both blocks are free
    assert addresses < {one.address for one in held}
    assert len({one.address for one in held}) == 2


def test_a_block_fits_results_of_nearly_its_size_and_no_others(buffers: FusionBuffers) -> None:
    """The memory that is returned has the size that was asked for."""
    address = result(buffers, LARGE_BYTES + 5).address
    assert result(buffers, 2 * LARGE_BYTES).address != address
    assert result(buffers, LARGE_BYTES // 2).address != address
    assert result(buffers, LARGE_BYTES + LARGE_BYTES // 9).address == address


def test_no_more_than_some_blocks_and_bytes_are_kept(buffers: FusionBuffers) -> None:
    """What is larger than the limit is not kept at all. The pages of these blocks are never touched."""
    held = [result(buffers, LARGE_BYTES) for _ in range(2 * MOST_BLOCKS)]
    assert len({one.address for one in held}) == 2 * MOST_BLOCKS
    assert len(buffers._blocks) == MOST_BLOCKS
    held.clear()
    for _ in range(3):
        held.append(result(buffers, MOST_BYTES // 2))
        assert sum(block.nbytes for block in buffers._blocks) <= MOST_BYTES
    result(buffers, MOST_BYTES + 1)
    assert buffers._blocks == []


@pytest.mark.timeout(120)
def test_results_that_are_kept_keep_their_values() -> None:
    """Of every second step, in replay and before."""
    count = 3 * LARGE_BYTES // 4 // 2

    def train(rank: int, job: Job) -> None:
        kept = []
        for step in range(12):
            results = (
                ddl.allgather(np.full(count, step + rank, np.float32), name="rows"),
                ddl.alltoall(np.full(2 * count, step + rank, np.float32), name="cells"),
                ddl.reducescatter(np.full(2 * count, step + rank, np.float32), name="sums", op=ddl.Sum),
            )
            if step % 2:
                kept.append((step, results))
        for step, (gathered, exchanged, summed) in kept:
            wanted = np.repeat(np.array([step, step + 1], np.float32), count)
            np.testing.assert_array_equal(gathered, wanted)
            np.testing.assert_array_equal(exchanged, wanted)
            np.testing.assert_array_equal(summed, np.full(count, 2 * step + 1, np.float32))

    with World(2, backend="shm", settings={"replay": True}) as world:
        world.run(train)
