"""The process group itself, in worlds of threads: results and work objects."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddl_torch.distributed.group import DdlProcessGroup
from ddl_torch.distributed.work import DoneWork, Works

from plugins.ddl_torch.tests.distributed.groups import OP, options, run

# --- results


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (OP.SUM, [6, 9, 9]),
        (OP.PRODUCT, [6, 24, 27]),
        (OP.MIN, [1, 2, 3]),
        (OP.MAX, [3, 4, 3]),
        (OP.BAND, [0, 0, 3]),
        (OP.BOR, [3, 7, 3]),
        (OP.BXOR, [0, 5, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_operation_on_integers(op: Any, wanted: list[int], dtype: torch.dtype) -> None:
    def play(group: DdlProcessGroup, rank: int) -> torch.Tensor:
        tensor = torch.tensor([1 + rank, 2 + rank, 3], dtype=dtype)
        group.allreduce([tensor], options(reduceOp=op)).wait()
        return tensor

    for tensor in run(3, play):
        assert tensor.tolist() == wanted
        assert tensor.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_averages_and_factors(dtype: torch.dtype) -> None:
    """AVG, and PREMUL_SUM, which multiplies each value by a factor before the sum."""

    def play(group: DdlProcessGroup, rank: int) -> list[list[float]]:
        results = []
        for op in (OP.AVG, dist._make_nccl_premul_sum(0.5)):
            tensor = torch.tensor([2.0, 4.0], dtype=dtype) * (rank + 1)
            group.allreduce([tensor], options(reduceOp=op)).wait()
            results.append(tensor.tolist())
        return results

    assert run(2, play) == [[[3.0, 6.0], [3.0, 6.0]]] * 2


def test_complex_and_bool() -> None:
    """Complex numbers are added as pairs. The maximum of booleans is their OR, and the minimum is their AND."""

    def play(group: DdlProcessGroup, rank: int) -> list[Any]:
        number = torch.tensor([1 + 2j]) * (rank + 1)
        group.allreduce([number], options(reduceOp=OP.SUM)).wait()
        truth = torch.tensor([True, rank == 0, False])
        both = truth.clone()
        group.allreduce([truth], options(reduceOp=OP.MAX)).wait()
        group.allreduce([both], options(reduceOp=OP.MIN)).wait()
        return [number.item(), truth.tolist(), both.tolist()]

    assert run(2, play) == [[3 + 6j, [True, True, False], [True, False, False]]] * 2


@pytest.mark.parametrize("op", [OP.SUM, OP.AVG])
def test_sparse_tensors(op: Any) -> None:
    """The ranks store different entries."""

    def play(group: DdlProcessGroup, rank: int) -> torch.Tensor:
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[rank, 2]]), torch.tensor([2.0, 4.0]), (4,), check_invariants=True
        )
        group.allreduce([tensor], options(reduceOp=op)).wait()
        return tensor.to_dense()

    wanted = torch.tensor([2.0, 2.0, 8.0, 0.0]) / (2 if op == OP.AVG else 1)
    for tensor in run(2, play):
        assert torch.equal(tensor, wanted)


def test_an_allreduce_of_sparse_tensors_may_be_waited_for_later() -> None:
    """The call returns before the other rank has made its call. Its future can be used without a call of ``wait``."""
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (2,), check_invariants=True)
        if rank == 1:
            assert late.wait(60)
        work = group.allreduce([tensor], options(reduceOp=OP.SUM))
        assert rank == 1 or not work.is_completed()
        late.set()
        (reduced,) = work.get_future().wait()
        assert reduced is tensor and work.is_success()
        return [float(value) for value in tensor.to_dense()]

    assert run(2, play) == [[1.0, 1.0]] * 2


def test_the_future_of_several_works_has_the_error_of_the_one_that_failed() -> None:
    class Failed(DoneWork):
        def get_future(self) -> Any:
            def fail(_: Any) -> None:
                raise RuntimeError("rank 7 is lost")

            ended: Any = torch.futures.Future()
            ended.set_result(None)
            return ended.then(fail)

    landed: list[Any] = []
    future = Works([DoneWork(), Failed()], [], landed.append).get_future()
    with pytest.raises(RuntimeError, match="rank 7 is lost"):
        future.wait()
    assert not landed


def test_a_reduce_scatter_of_unequal_parts() -> None:
    """Rank r gets r + 1 elements."""

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        parts = [torch.full((to + 1,), float(10 * to + rank)) for to in range(3)]
        output = torch.zeros(rank + 1)
        group.reduce_scatter([output], [parts], options("ReduceScatter", reduceOp=OP.SUM)).wait()
        bits = torch.zeros(rank + 1, dtype=torch.int64)
        group.reduce_scatter([bits], [[one.long() for one in parts]], options("ReduceScatter", reduceOp=OP.BOR)).wait()
        assert bits.tolist() == [10 * rank | 10 * rank + 1 | 10 * rank + 2] * (rank + 1)
        return output.tolist()

    assert run(3, play) == [[3.0], [33.0] * 2, [63.0] * 3]


def test_a_bitwise_reduce_scatter_of_one_tensor() -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        parts = torch.tensor([[1, 2], [4, 8], [16, 32]])
        source = parts + int(rank == 2)
        output = torch.zeros(2, 2, dtype=torch.int64)[:, 0]  # has gaps
        group.reduce_scatter_single(output, source, options("ReduceScatter", reduceOp=OP.BXOR)).wait()
        assert output.tolist() == (parts[rank] + 1).tolist()

    run(3, play)


def test_lists_whose_tensors_follow_each_other_are_used_in_place() -> None:
    """``chunk`` makes such lists. A list in another order, or with gaps, is copied: the results are the same."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        source = torch.full((2,), float(rank + 1))
        for order in ([0, 1, 2], [2, 0, 1], [0, 2, 4]):
            whole = torch.zeros(6, 2)
            targets = [whole[at] for at in order]
            group.allgather([targets], [source], options("Allgather")).wait()
            assert [target.tolist() for target in targets] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
            assert int(whole.count_nonzero()) == 6

    run(3, play)


def test_output_and_input_may_share_memory() -> None:
    """FSDP gathers from a part of the output, and reduces into a part of the input."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        for _ in range(6):
            whole = torch.zeros(8)
            mine = whole[2 * rank : 2 * rank + 2]
            mine.fill_(rank + 1.0)
            group.all_gather_single(whole, mine, options("Allgather")).wait()
            assert whole.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
            group.reduce_scatter_single(mine, whole, options("ReduceScatter", reduceOp=OP.SUM)).wait()
            assert mine.tolist() == [4.0 * (rank + 1)] * 2

    run(4, play)


# --- work


def gappy(values: list[float]) -> torch.Tensor:
    """Return a tensor with ``values``, and with gaps between them."""
    tensor = torch.zeros(2 * len(values))[::2]
    tensor.copy_(torch.tensor(values))
    return tensor


def test_a_completed_work_has_written_its_outputs() -> None:
    """Also if the output has gaps, so that the result is copied to it, and if nobody calls ``wait``."""

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        tensor = gappy([1.0, 2.0])
        work = group.allreduce([tensor], options(asyncOp=True))
        until_s = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < until_s
            time.sleep(0.001)
        assert work.is_success()
        assert work.exception() is None
        return tensor.tolist()

    assert run(2, play) == [[2.0, 4.0]] * 2


def test_nothing_is_copied_to_an_output_after_the_wait() -> None:
    """Two threads wait for one work object. When ``wait`` returns in one of them, no thread is copying any more."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        for _ in range(30):
            tensor = gappy([float(i) for i in range(2000)])
            work = group.allreduce([tensor], options(asyncOp=True))
            other = threading.Thread(target=work.wait)
            other.start()
            work.wait()
            tensor.fill_(7.0)
            other.join()
            assert bool((tensor == 7.0).all())

    run(2, play)


def test_futures_have_the_outputs() -> None:
    def play(group: DdlProcessGroup, rank: int) -> torch.Tensor:
        tensor = gappy([1.0, 2.0])
        future = group.allreduce([tensor], options(asyncOp=True)).get_future()
        (value,) = future.then(lambda ended: ended.value()).wait()
        assert id(value) == id(tensor)
        return tensor

    assert [result.tolist() for result in run(2, play)] == [[2.0, 4.0]] * 2
