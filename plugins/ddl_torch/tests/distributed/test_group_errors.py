"""Calls of a process group that contradict those of other ranks, or whose arguments do not fit, in worlds of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ddl_torch.distributed.group import DdlProcessGroup

from ddlcore.errors import MismatchError
from plugins.ddl_torch.tests.distributed.groups import OP, options, run


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
