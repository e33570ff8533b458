"""Results that are written to tensors of the caller: by an allgather, an alltoall and a reducescatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api.operations import Operations
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import InvalidArgument, MismatchError, TransportError
from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(120)

SIZE = 3
STEPS = 12  # enough for replay
OPS = Operations(NumpyAdapter())
TYPES = (np.int64, np.float32, np.complex128)

BACKENDS = pytest.mark.parametrize("backend", ["shm", "threads"])


def run(body: Callable[[int, Job], Any], backend: str = "threads") -> list[Any]:
    with World(SIZE, backend=backend, settings={"replay": True}) as world:
        results: list[Any] = world.run(body)
        return results


@BACKENDS
def test_every_kind_in_every_step(backend: str) -> None:
    """The result is written to the output. Each step gives another output. In replay, no step sends a message."""

    def train(rank: int, job: Job) -> int:
        messages = 0
        for step in range(STEPS):
            if step == STEPS // 2:
                messages = ddl.stats()["control_messages"]
            for dtype in TYPES:
                _step(rank, step, dtype)
        return ddl.stats()["control_messages"] - messages

    assert run(train, backend) == [0] * SIZE


def _step(rank: int, step: int, dtype: Any) -> None:
    name = np.dtype(dtype).name
    mine = [np.arange(4, dtype=dtype).reshape(2, 2) + 10 * r + step for r in range(SIZE)]
    stacked = np.empty((SIZE, 2, 2), dtype)
    assert OPS.allgather_async(mine[rank], output=stacked, name=f"gather {name}").wait() is stacked
    np.testing.assert_array_equal(stacked, np.stack(mine))

    cells = [np.arange(2 * SIZE, dtype=dtype) + 100 * r + step for r in range(SIZE)]
    flat = np.empty(2 * SIZE, dtype)
    got, received = OPS.alltoall_async(cells[rank], output=flat, name=f"cells {name}").wait()
    assert got is flat and received == [2] * SIZE
    np.testing.assert_array_equal(flat, np.concatenate([c[2 * rank : 2 * rank + 2] for c in cells]))

    splits = [[(r + to + step) % 3 for to in range(SIZE)] for r in range(SIZE)]  # others in each step
    rows = [np.full((sum(splits[r]), 2), 10 * r + step, dtype) for r in range(SIZE)]
    came = [splits[r][rank] for r in range(SIZE)]
    uneven = np.empty((sum(came), 2), dtype)
    got, received = OPS.alltoall_async(rows[rank], splits[rank], output=uneven, name=f"rows {name}").wait()
    assert got is uneven and received == came
    np.testing.assert_array_equal(
        uneven, np.repeat(np.array([10 * r + step for r in range(SIZE)], dtype), came)[:, None].repeat(2, 1)
    )

    tensor = np.arange(SIZE * 2 + 1, dtype=dtype) + step
    for op in (ddl.Sum, ddl.Average):
        part = np.empty(3 if rank == 0 else 2, dtype)
        how: Any = {"op": op, "name": f"part {name} {op.name}"}
        assert OPS.reducescatter_async(tensor * (rank + 1), output=part, **how).wait() is part
        whole = tensor * 6 if op is ddl.Sum else tensor * 2
        np.testing.assert_array_equal(part, np.split(whole, [3, 5])[rank])


@BACKENDS
def test_the_tensor_may_be_a_part_of_the_output(backend: str) -> None:
    """As with FSDP, whose shard is a view of the whole. A reducescatter may write its part over what it has read."""

    def train(rank: int, job: Job) -> None:
        for step in range(STEPS):
            whole = np.zeros(4 * SIZE)
            shard = whole[4 * rank : 4 * rank + 4]
            shard[:] = 10 * rank + step
            OPS.allgather_async(shard, output=whole, name="whole").wait()
            np.testing.assert_array_equal(whole, np.repeat([10.0 * r + step for r in range(SIZE)], 4))
            OPS.reducescatter_async(whole, output=whole[4 * rank : 4 * rank + 4], op=ddl.Sum, name="part").wait()
            wanted = np.repeat([10.0 * r + step for r in range(SIZE)], 4)
            wanted[4 * rank : 4 * rank + 4] *= SIZE
            np.testing.assert_array_equal(whole, wanted)
            got, _ = OPS.alltoall_async(whole, output=whole, name="over itself").wait()
            np.testing.assert_array_equal(
                got, np.repeat([(10.0 * rank + step) * (SIZE if r == rank else 1) for r in range(SIZE)], 4)
            )

    run(train, backend)


def test_grouped_calls() -> None:
    def train(rank: int, job: Job) -> None:
        for step in range(STEPS):
            tensors = [np.full((1, n), rank + step) for n in (1, 2, 3)]
            outputs = [np.empty((SIZE, n), int) for n in (1, 2, 3)]
            got = OPS.grouped_allgather_async(tensors, outputs=outputs, name="gather").wait()
            assert all(one is output for one, output in zip(got, outputs))
            assert [list(output[:, 0]) for output in outputs] == [[r + step for r in range(SIZE)]] * 3
            parts = [np.empty((1, n), int) for n in (1, 2, 3)]
            OPS.grouped_reducescatter_async(outputs, outputs=parts, op=ddl.Sum, name="scatter").wait()
            assert [part[0, 0] for part in parts] == [SIZE * (rank + step)] * 3

    run(train)


@pytest.mark.parametrize("late", [0, STEPS], ids=["at once", "in replay"])
def test_shapes_that_differ_are_refused_on_every_rank(late: int) -> None:
    """With an output, all ranks must gather equally many rows. The table says how many; the job goes on."""

    def train(rank: int, job: Job) -> str:
        for _ in range(late):
            OPS.allgather_async(np.ones((2, 3)), output=np.empty((2 * SIZE, 3)), name="gather").wait()
        rows = 5 if rank == 1 else 2
        with pytest.raises(MismatchError) as caught:
            OPS.allgather_async(np.ones((rows, 3)), output=np.empty((rows * SIZE, 3)), name="gather").wait()
        whole = np.empty((2 * SIZE, 3))
        OPS.allgather_async(np.full((2, 3), float(rank)), output=whole, name="gather").wait()
        assert list(whole[::2, 0]) == [0.0, 1.0, 2.0]
        return str(caught.value)

    for text in run(train):
        assert "(2,3)" in text and "(5,3)" in text, text


def test_rows_that_do_not_fill_the_output() -> None:
    """Of an alltoall with splits: only the rank whose output is wrong raises an error, at once or in replay; the job goes on."""

    def train(rank: int, job: Job) -> None:
        for step in range(STEPS + 1):
            right = rank or step % STEPS
            output = np.empty(SIZE if right else SIZE + 1)
            handle = OPS.alltoall_async(np.full(SIZE, float(rank)), [1] * SIZE, output=output, name="cells")
            if right:
                np.testing.assert_array_equal(handle.wait()[0], [0.0, 1.0, 2.0])
            else:
                with pytest.raises(TransportError, match="the result has 3 elements, and output has 4"):
                    handle.wait()

    run(train)


def test_a_rank_that_has_joined() -> None:
    """It sends no rows, so that the result does not fill the output: an error on the ranks that have not joined."""

    def train(rank: int, job: Job) -> None:
        if rank == 2:
            ddl.join()
            return
        output = np.empty(2 * SIZE)
        with pytest.raises(TransportError, match="the result has 4 elements, and output has 6; has a rank joined"):
            OPS.allgather_async(np.ones(2), output=output, name="gather").wait()
        part = np.empty(2)
        if rank == 0:
            OPS.reducescatter_async(np.ones(2 * SIZE), output=part, op=ddl.Sum, name="scatter").wait()
            assert list(part) == [2.0, 2.0]
        else:
            OPS.reducescatter_async(np.ones(2 * SIZE), output=part, op=ddl.Sum, name="scatter").wait()
        ddl.join()

    run(train)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (
            np.empty(5),
            r"output has shape \(5,\) and type float64, and the result has 6 rows of shape \(\) and type float64",
        ),
        (np.empty(6, np.float32), "and type float32"),
        (np.empty((6, 2))[:, 0], "not contiguous"),
        (np.frombuffer(bytes(48)), "read-only"),
    ],
    ids=["count", "type", "gaps", "read-only"],
)
def test_outputs_that_do_not_fit(output: Any, text: str) -> None:
    """They are refused at the call, and nothing is sent."""

    def train(rank: int, job: Job) -> None:
        with pytest.raises(InvalidArgument, match=text):
            OPS.allgather_async(np.ones(2), output=output, name="gather")
        with pytest.raises(InvalidArgument, match="2 outputs are given for 1 tensors; give one for each"):
            OPS.grouped_allgather_async([np.ones(2)], outputs=[np.empty(6)] * 2, name="gather")

    run(train)
