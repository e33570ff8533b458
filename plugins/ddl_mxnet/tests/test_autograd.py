"""The gradient of every collective follows the rules in ddl_mxnet.autograd; the expected sums are written by hand."""

from __future__ import annotations

import threading
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import pytest
from ddl_mxnet.engine import Pushed
from ddl_mxnet.traffic import EngineTraffic

from ddlcore.testing import run_world

SIZE = 3


def gradients(function: Any, *, size: int = SIZE, grad_req: str = "write", passes: int = 1) -> list[list[float]]:
    """Return d loss / d x for each rank, where ``function(rank, x)`` gives the loss of a rank for its x of 6 rows."""

    def play(rank: int, job: Any) -> list[float]:
        x = mx.nd.arange(1.0, 7.0) * (rank + 1)
        x.attach_grad(grad_req)
        for _ in range(passes):
            with mx.autograd.record():
                loss = function(rank, x)
            loss.backward()
        return [round(float(value), 4) for value in x.grad.asnumpy()]

    return run_world(size, play)


def weights(rank: int, rows: int = 6) -> Any:
    """Return the weight of each row in a rank's loss."""
    return mx.nd.arange(1.0, rows + 1) * float(10**rank)


TOTAL = [111.0 * row for row in range(1, 7)]  # the weights of all ranks, summed


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1 / SIZE),
        ({"op": ddl.Sum}, 1.0),
        ({"op": ddl.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0}, 6.0),
        ({"compression": ddl.Compression.bf16, "op": ddl.Sum}, 1.0),
        ({"name": "named"}, 1 / SIZE),
    ],
    ids=["average", "sum", "scaled", "compressed", "named"],
)
def test_allreduce(options: dict[str, Any], factor: float) -> None:
    """The gradient of allreduce is an allreduce with the same op and scales."""
    found = gradients(lambda rank, x: (ddl.allreduce(x, **options) * weights(rank)).sum())
    tolerance = 0.01 if "compression" in options else 1e-4
    for one in found:
        assert one == pytest.approx([value * factor for value in TOTAL], rel=tolerance)


def test_gradients_are_added_where_that_is_asked_for() -> None:
    """With grad_req="add" gradients accumulate, which MXNet's own Function does not do."""
    found = gradients(
        lambda rank, x: (ddl.allreduce(x, op=ddl.Sum, name="a") * weights(rank)).sum(), grad_req="add", passes=2
    )
    assert found == [[2 * value for value in TOTAL]] * SIZE


def test_grouped_allreduce() -> None:
    """Each array of a group gets its gradient, even if another input needs none."""

    def loss(rank: int, x: Any) -> Any:
        constant = mx.nd.ones((6,))
        _, first, second, _ = ddl.grouped_allreduce([constant, x, 2 * x, x * 5], name="g", op=ddl.Sum)
        return (first * weights(rank)).sum() + (second * weights(rank)).sum()

    assert gradients(loss) == [[3 * value for value in TOTAL]] * SIZE


def test_allgather() -> None:
    """The gradient is the average of the gradients of this rank's rows; ranks give different numbers of rows."""

    def loss(rank: int, x: Any) -> Any:
        gathered = ddl.allgather(x[: rank + 1], name="rows")  # (1 + 2 + 3,)
        return (gathered * weights(rank)).sum()

    mean = [value / SIZE for value in TOTAL]
    assert gradients(loss) == [[*mean[:1], 0, 0, 0, 0, 0], [*mean[1:3], 0, 0, 0, 0], [*mean[3:], 0, 0, 0]]


def test_grouped_allgather() -> None:
    """Each array of a group gets the gradients of its own rows."""

    def loss(rank: int, x: Any) -> Any:
        one, two = ddl.grouped_allgather([x[:2], x[2:4]])
        return (one * weights(rank)).sum() + 2 * (two * weights(rank)).sum()

    mean = [value / SIZE for value in TOTAL]
    assert gradients(loss) == [
        pytest.approx([*mean[2 * r : 2 * r + 2], *(2 * m for m in mean[2 * r : 2 * r + 2]), 0, 0]) for r in range(SIZE)
    ]


def test_broadcast() -> None:
    """The root gets the average of the gradients, and the other ranks get zero."""
    found = gradients(lambda rank, x: (ddl.broadcast(x, 1, name="b") * weights(rank)).sum())
    assert found == [[0.0] * 6, [value / SIZE for value in TOTAL], [0.0] * 6]


def test_alltoall() -> None:
    """The gradient of every row comes back from the rank that received the row."""

    def loss(rank: int, x: Any) -> Any:
        rows, received = ddl.alltoall(x, splits=[1, 2, 3], name="a")
        assert received.asnumpy().tolist() == [rank + 1] * SIZE
        return (rows * float(10**rank)).sum()

    assert gradients(loss) == [[1.0, 10.0, 10.0, 100.0, 100.0, 100.0]] * SIZE


@pytest.mark.parametrize(("op", "factor"), [(ddl.Average, 1.0), (ddl.Sum, float(SIZE))], ids=["average", "sum"])
def test_reducescatter(op: Any, factor: float) -> None:
    """Each rank gets the gradients of all rows, gathered from the ranks that have them."""

    def loss(rank: int, x: Any) -> Any:
        return (ddl.reducescatter(x, op=op, prescale_factor=2.0) * float(10**rank)).sum()

    expected = [2 * factor * value for value in (1.0, 1.0, 10.0, 10.0, 100.0, 100.0)]
    assert gradients(loss) == [expected] * SIZE


def test_what_has_no_gradient_says_so() -> None:
    """Only computing a gradient that does not exist raises; a thread that waits for it gets the named error."""

    def play(rank: int, job: Any) -> None:
        x = mx.nd.ones((3,))
        x.attach_grad()
        with mx.autograd.record():
            most = ddl.allreduce(x * (rank + 1), op=ddl.Max, name="m")
        assert most.asnumpy().tolist() == [2.0] * 3
        most.backward()
        with pytest.raises(NotImplementedError, match=r"allreduce with op=Max.*detach"):
            x.grad.asnumpy()

    run_world(2, play)


def test_nothing_is_recorded_outside() -> None:
    """Without record(), and for arrays that need no gradient, a collective is not recorded."""
    from ddl_mxnet import function

    def play(rank: int, job: Any) -> None:
        x = mx.nd.ones((3,))
        ddl.allreduce(x, name="out").wait_to_read()
        with mx.autograd.record():
            ddl.allreduce(x, name="in").wait_to_read()

    before = set(function._recorded)  # what earlier tests recorded may be deleted meanwhile
    run_world(2, play)
    assert function._recorded.keys() <= before


def test_backward_passes_in_another_order_on_each_rank() -> None:
    """Gradients of calls without names are paired correctly, even if ranks run backward passes in different orders."""
    both_run_one = threading.Barrier(2)

    def play(rank: int, job: Any) -> list[float]:
        traffic = job.companion(EngineTraffic)
        inputs = [mx.nd.ones((4,)), mx.nd.ones((4,))]
        factors = [mx.nd.full((4,), 2.0), mx.nd.full((4,), 30.0)]
        mx.autograd.mark_variables(inputs, [mx.nd.zeros((4,)), mx.nd.zeros((4,))])
        begun = threading.Event()
        late = Pushed((), [factors[rank]], begun.set)  # the factor is ready when this operation ends
        late.push()
        with mx.autograd.record():
            reduced = [ddl.allreduce(array, op=ddl.Sum) for array in inputs]
            losses = [(array * factor).sum() for array, factor in zip(reduced, factors)]
        for array in reduced:
            array.wait_to_read()
        mx.autograd.backward(losses)
        with traffic._changed:
            assert traffic._changed.wait_for(lambda: traffic._running == 1, 60.0)
        both_run_one.wait(60.0)  # the rank that goes on first would end the call that the other rank looks for
        after = ddl.allreduce(mx.nd.full((4,), 500.0), op=ddl.Sum)
        late.end()
        return [float(array.asnumpy()[0]) for array in (inputs[0].grad, inputs[1].grad, after)]

    assert run_world(2, play) == [[4.0, 60.0, 1000.0]] * 2
