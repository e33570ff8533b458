"""The process group itself, in worlds of threads: results, errors on every rank, time limits, and work objects.

Its methods are called directly, because torch keeps the groups of ``torch.distributed`` once for each process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddl_torch.distributed import described
from ddl_torch.distributed.group import DdlProcessGroup
from ddl_torch.distributed.work import DoneWork, Works

from ddlcore import api
from ddlcore.errors import DeadlineExceeded, MismatchError
from ddlcore.testing import run_world

SHORT = timedelta(seconds=0.3)
ALIKE = 12  # equal steps, after which they are replayed
OP = dist.ReduceOp


def run(
    size: int, play: Callable[[DdlProcessGroup, int], Any], timeout_s: float = 60.0, backend: str = "threads"
) -> list[Any]:
    """Call ``play(group, rank)`` on every rank of a world of threads. Return the results by rank."""
    store = dist.HashStore()

    def begin(rank: int, job: api.Job) -> Any:
        ranks = range(size)
        group = DdlProcessGroup(store, rank, ranks, api.global_process_set, timedelta(seconds=timeout_s), False)
        return play(group, rank)

    return run_world(size, begin, backend=backend)


def options(kind: str = "Allreduce", **values: Any) -> Any:
    """Return the options that torch gives to a collective, for a call that waits unless ``values`` say otherwise."""
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(made, name, value)
    return made


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
    """The call returns before the other rank has made it, also if only the future is used, as by a hook of a model."""
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
    """Two threads wait for one work. When the first of them goes on, the other copies no more."""

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


# --- errors


def calls(group: DdlProcessGroup) -> dict[str, Callable[[], Any]]:
    """Return calls of which any two contradict each other, by a word of the table in the message."""
    three, four = torch.zeros(3), torch.zeros(4)
    return {
        "allreduce of 3": lambda: group.allreduce([three], options()),
        "allreduce of 4": lambda: group.allreduce([four], options()),
        "allreduce of integers": lambda: group.allreduce([torch.zeros(3, dtype=torch.int64)], options()),
        "maximum": lambda: group.allreduce([three], options(reduceOp=OP.MAX)),
        "broadcast": lambda: group.broadcast([three], options("Broadcast", rootRank=0)),
        "broadcast from 1": lambda: group.broadcast([three], options("Broadcast", rootRank=1)),
        "allgather": lambda: group.all_gather_single(torch.zeros(6), three, options("Allgather")),
        "reduce_scatter": lambda: group.reduce_scatter_single(torch.zeros(2), four, options("ReduceScatter")),
        "alltoall": lambda: group.all_to_all_single(torch.zeros(4), four, [], [], options("AllToAll")),
        "barrier": lambda: group.barrier(options("Barrier")),
        **{f"reduce to {root}": partial(group.reduce, [three], options("Reduce", rootRank=root)) for root in (0, 1)},
        **{f"gather to {root}": partial(_gather, group, root) for root in (0, 1)},
        **{f"scatter from {root}": partial(_scatter, group, root) for root in (0, 1)},
        **{f"bitwise {op}": partial(_bitwise, group, getattr(OP, op)) for op in ("BAND", "BOR")},
    }


def _gather(group: DdlProcessGroup, root: int) -> Any:
    outputs = [[torch.zeros(3) for _ in range(2)]] if group.rank() == root else []
    return group.gather(outputs, [torch.zeros(3)], options("Gather", rootRank=root))


def _scatter(group: DdlProcessGroup, root: int) -> Any:
    inputs = [[torch.zeros(3) for _ in range(2)]] if group.rank() == root else []
    return group.scatter([torch.zeros(3)], inputs, options("Scatter", rootRank=root))


def _bitwise(group: DdlProcessGroup, op: Any) -> Any:
    return group.allreduce([torch.zeros(3, dtype=torch.int64)], options(reduceOp=op))


NAMES = ["allreduce of 3", "allreduce of 4", "allreduce of integers", "maximum", "broadcast", "broadcast from 1"]
NAMES += [
    "allgather",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "reduce to 0",
    "reduce to 1",
    "gather to 0",
    "gather to 1",
]
NAMES += ["scatter from 0", "scatter from 1", "bitwise BAND", "bitwise BOR"]


@pytest.mark.parametrize("one", NAMES)
def test_calls_that_contradict_each_other_raise_on_all_ranks(one: str) -> None:
    """They raise instead of hanging. Afterwards the group can be used."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        for other in NAMES:
            if other == one:
                continue
            with pytest.raises(MismatchError):
                calls(group)[one if rank == 0 else other]().wait()
        tensor = torch.ones(2)
        group.allreduce([tensor], options()).wait()
        assert tensor.tolist() == [2.0, 2.0]

    run(2, play)


STEADY = [("allreduce of 3", "allreduce of 4"), ("allreduce of 3", "broadcast"), ("barrier", "allgather")]
STEADY += [("broadcast", "broadcast from 1"), ("allgather", "allreduce of 3"), ("reduce_scatter", "barrier")]
STEADY += [("reduce to 0", "reduce to 1"), ("scatter from 1", "scatter from 0"), ("bitwise BAND", "bitwise BOR")]


@pytest.mark.parametrize(("one", "other"), STEADY, ids=[f"{one}, {other}" for one, other in STEADY])
def test_they_also_raise_in_a_loop_that_is_replayed(one: str, other: str) -> None:
    """There, the ranks that go on as before are in a collective already. They are called back after a second.

    Over shared memory, the calling threads run the collectives themselves.
    """

    def play(group: DdlProcessGroup, rank: int) -> None:
        for _ in range(12):
            calls(group)[one]().wait()
        with pytest.raises(MismatchError):
            calls(group)[one if rank == 0 else other]().wait()
        calls(group)[one]().wait()

    run(2, play, backend="shm")


def test_a_future_of_a_failed_operation_raises() -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        work = group.allreduce([torch.zeros(3 + rank)], options(asyncOp=True))
        with pytest.raises(RuntimeError, match="shape"):
            work.get_future().wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)

    run(2, play)


@pytest.mark.parametrize("limit", ["wait", "call", "group"])
def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_wished(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait, the call or the group limits the time. When the rank comes after all, the operation ends."""
    monkeypatch.setattr(described, "GRACE_S", 0.0)
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        tensor = torch.ones(2)
        if rank == 1:
            assert late.wait(30)
        made = group.allreduce([tensor], options(asyncOp=True, timeout=SHORT if limit == "call" else timedelta(0)))
        if rank == 0:
            begun_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"not ended after 0\.3 s: some rank has not started it"):
                made.wait(SHORT) if limit == "wait" else made.wait()
            assert 0.2 < time.monotonic() - begun_s < 20
            late.set()
        made.wait(timedelta(seconds=30))
        return tensor.tolist()

    assert run(2, play, timeout_s=0.3 if limit == "group" else 60) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("limit", ["call", "group"])
def test_a_blocking_call_in_replay_has_the_same_time_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread runs the collective itself then. The operation goes on, and ends when the rank comes after all."""
    monkeypatch.setattr(described, "GRACE_S", 0.0)
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        opts = options(asyncOp=False, timeout=SHORT if limit == "call" else timedelta(0))
        tensor, usual = torch.ones(2), options(asyncOp=False, timeout=timedelta(seconds=60))
        for _ in range(ALIKE):
            group.allreduce([torch.ones(2)], usual).wait()
        if rank == 1:
            assert late.wait(30)
            group.allreduce([tensor], usual).wait()
        else:
            begun_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"not ended after 0\.3 s"):
                group.allreduce([tensor], opts).wait()
            assert 0.2 < time.monotonic() - begun_s < 20
            late.set()
        group.barrier(options("Barrier", timeout=timedelta(seconds=60))).wait()
        return tensor.tolist()

    assert run(2, play, timeout_s=0.3 if limit == "group" else 60, backend="shm") == [[2.0, 2.0]] * 2


def test_several_operations_in_one_work_have_a_time_limit_too() -> None:
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[list[float]]:
        outputs, inputs = [torch.zeros(2), torch.zeros(4)], [torch.ones(1), torch.ones(2)]
        if rank == 1:
            assert late.wait(30)
        made = group.all_gather_single_coalesced(outputs, inputs, options("Allgather", asyncOp=True))
        if rank == 0:
            with pytest.raises(DeadlineExceeded):
                made.wait(SHORT)
            late.set()
        made.wait(timedelta(seconds=30))
        return [output.tolist() for output in outputs]

    assert run(2, play) == [[[1.0] * 2, [1.0] * 4]] * 2


def refused() -> dict[str, tuple[Callable[[DdlProcessGroup], Any], str]]:
    """Return calls with arguments that do not fit, and what the error says."""
    six = torch.zeros(6)
    gathers, scatters, exchanges = options("Allgather"), options("ReduceScatter"), options("AllToAll")
    return {
        "output of all_gather": (
            lambda group: group.all_gather_single(torch.zeros(5), torch.zeros(3), gathers),
            "all_gather: the output has 5 elements, and the input 3; the output must have 2 times as many",
        ),
        "type of the output": (
            lambda group: group.all_gather_single(six.long(), torch.zeros(3), gathers),
            "output has shape .* and type int64, and the result has .* type float32",
        ),
        "input of reduce_scatter": (
            lambda group: group.reduce_scatter_single(torch.zeros(2), six, scatters),
            "reduce_scatter: the input has 6 elements, and the output 2; the input must have 2 times as many",
        ),
        "shapes of all_to_all_single": (
            lambda group: group.all_to_all_single(torch.zeros(4), six, [], [], exchanges),
            r"all_to_all_single: the input has shape \(6,\) and the output \(4,\)",
        ),
        "splits of all_to_all_single": (
            lambda group: group.all_to_all_single(six.clone(), six, [3, 3], [2, 2], exchanges),
            r"the split sizes \[2, 2\] and \[3, 3\] do not add up to the first dimensions of the input, 6",
        ),
        "two tensors": (
            lambda group: group.allreduce([six, six], options()),
            "a call has one tensor for each rank, not 2",
        ),
        "bits of floats": (
            lambda group: group.allreduce([six], options(reduceOp=OP.BAND)).wait(),
            "bitwise operations are for integers, not for torch.float32",
        ),
        "maximum of sparse tensors": (
            lambda group: group.allreduce([six.to_sparse()], options(reduceOp=OP.MAX)),
            "has no meaning for sparse tensors; use Average or Sum",
        ),
    }


@pytest.mark.parametrize("what", refused())
def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(what: str) -> None:
    call, message = refused()[what]

    def play(group: DdlProcessGroup, rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            call(group)
        group.barrier(options("Barrier")).wait()

    run(2, play)


# --- from rank to rank, and waiting


def test_sends_and_receives() -> None:
    """By rank and tag, and from any rank, which the work then names."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        if rank == 0:
            first, second, third = torch.zeros(2), torch.zeros(2), torch.zeros(1)
            later = group.recv([second], 1, 8)
            group.recv([first], 1, 7).wait()
            later.wait()
            anyone = group.recv_anysource([third], 9)
            anyone.wait()
            assert anyone._source_rank() == 2
            assert [first.tolist(), second.tolist(), third.tolist()] == [[7.0] * 2, [8.0] * 2, [9.0]]
        elif rank == 1:
            for tag in (7, 8):
                group.send([torch.full((2,), float(tag))], 0, tag).wait()
        else:
            group.send([torch.full((1,), 9.0)], 0, 9).wait()
        group.barrier(options("Barrier")).wait()

    run(3, play)


@pytest.mark.parametrize("everyone", [False, True])
def test_a_monitored_barrier_names_who_is_missing(everyone: bool) -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        group.monitored_barrier(timedelta(seconds=30))
        if rank in (1, 2):
            return
        with pytest.raises(RuntimeError, match="ranks 1, 2 did" if everyone else "ranks 1 did not call it within 0.3"):
            group.monitored_barrier(SHORT, wait_all_ranks=everyone)

    run(4, play)


def test_a_monitored_barrier_without_rank_0() -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        if rank > 0:
            with pytest.raises(RuntimeError, match=r"ranks 0 did not call it within 0\.3 s"):
                group.monitored_barrier(SHORT)

    run(3, play)
