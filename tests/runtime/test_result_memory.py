"""Large results use the memory of former ones, and never that of arrays that are still there."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.memory import LARGE_BYTES, Memory
from ddlcore.process.job import Job
from ddlcore.runtime import result_memory as tested
from ddlcore.runtime.result_memory import MOST_BLOCKS, MOST_BYTES, FreeBlocks, result_memory
from ddlcore.testing import World
from ddlcore.types import DType


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> FreeBlocks:
    """Blocks of this test alone."""
    blocks = FreeBlocks()
    monkeypatch.setattr(tested, "FREE", blocks)
    return blocks


def array_of(memory: Memory) -> Any:
    return NumpyAdapter().adopt(memory, (memory.nbytes,), DType.U8, np.zeros(1, np.uint8))


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    memory = result_memory(LARGE_BYTES)
    address = memory.address
    view = array_of(memory)[100:200]
    del memory
    gc.collect()
    other = result_memory(LARGE_BYTES)
    assert other.address != address
    del view
    assert result_memory(LARGE_BYTES).address == address


def test_a_block_fits_results_of_nearly_its_size_and_no_others() -> None:
    memory = result_memory(LARGE_BYTES + 5)
    address = memory.address
    assert (memory.nbytes, memory._block.nbytes) == (LARGE_BYTES + 5, LARGE_BYTES * 9 // 8)  # type: ignore[attr-defined]
    del memory
    assert result_memory(2 * LARGE_BYTES).address != address
    assert result_memory(LARGE_BYTES // 2).address != address
    assert result_memory(LARGE_BYTES + LARGE_BYTES // 9).address == address


def test_no_more_than_some_blocks_and_bytes_are_kept(free: FreeBlocks) -> None:
    held = [result_memory(LARGE_BYTES) for _ in range(2 * MOST_BLOCKS)]
    last = held[-1].address
    while held:
        held.pop(0)
    assert len(free._blocks) == MOST_BLOCKS
    assert result_memory(LARGE_BYTES).address == last
    big = [result_memory(MOST_BYTES // 2) for _ in range(3)]  # their pages are never touched
    big.append(result_memory(MOST_BYTES + 1))
    big.clear()
    assert sum(block.nbytes for block in free._blocks) <= MOST_BYTES


def test_threads_never_share_a_block() -> None:
    """Each thread writes its number to its blocks, and finds only its own number there."""
    faults: list[str] = []

    def work(number: int) -> None:
        for _ in range(300):
            arrays = [array_of(result_memory(LARGE_BYTES)) for _ in range(3)]
            for one in arrays:
                one[:: LARGE_BYTES // 16] = number
            faults.extend("shared" for one in arrays if (one[:: LARGE_BYTES // 16] != number).any())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert not faults


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
