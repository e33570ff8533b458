"""Tests Horovod's collectives on torch tensors: values, in place, asynchronous, grouped, and what they refuse."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

SIZE = 3


def ranks(function: Any) -> list[Any]:
    return run_world(SIZE, lambda rank, job: function(rank))


def own(rank: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (4,), float(rank + 1))


def test_allreduce() -> None:
    """The default is the average; scales apply before and after; every operation is right."""

    def play(rank: int) -> list[float]:
        x = own(rank)
        results = [
            ddl.allreduce(x),
            ddl.allreduce(x, name="sum", op=ddl.Sum),
            ddl.allreduce(x, op=ddl.Sum, prescale_factor=2.0, postscale_factor=0.5),
            ddl.allreduce(x, op=ddl.Min),
            ddl.allreduce(x, op=ddl.Max),
            ddl.allreduce(x, op=ddl.Product),
            ddl.allreduce(x, None, "positional", ddl.Compression.fp16, ddl.Sum),
        ]
        assert x.tolist() == own(rank).tolist(), "an argument was changed"
        return [result[0].item() for result in results]

    assert ranks(play) == [[2.0, 6.0, 6.0, 1.0, 3.0, 6.0, 6.0]] * SIZE


def test_in_place_results_are_the_arguments() -> None:
    """In-place collectives return their arguments, whether synchronous, asynchronous or grouped."""

    def play(rank: int) -> None:
        x = own(rank)
        assert ddl.allreduce_(x, None, "x", ddl.Sum) is x
        assert x.tolist() == [6.0] * 4
        y = own(rank)
        handle = ddl.allreduce_async_(y, op=ddl.Sum)
        assert ddl.synchronize(handle) is y
        assert ddl.synchronize(handle) is y, "a second wait gives the same"
        pair = [own(rank), own(rank, 2)]
        assert all(a is b for a, b in zip(ddl.grouped_allreduce_(pair, op=ddl.Sum), pair, strict=True))
        again = ddl.synchronize(ddl.grouped_allreduce_async_(pair))
        assert all(a is b for a, b in zip(again, pair, strict=True))
        z = own(rank)
        assert ddl.broadcast_(z, 1) is z
        assert z.tolist() == [2.0] * 4
        assert ddl.synchronize(ddl.broadcast_async_(z, root_rank=2)) is z

    ranks(play)


def test_autograd_is_told_of_changes_in_place() -> None:
    """If a tensor saved for backward is reduced in place, backward raises instead of giving a wrong gradient."""

    def play(rank: int) -> None:
        x = torch.ones(3, requires_grad=True)
        saved = x * 2
        loss = (saved * saved).sum()
        ddl.allreduce_(saved.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    ranks(play)


def test_handles_are_asynchronous() -> None:
    """A rank goes on while another has not called yet; ``poll`` is False until that rank calls."""
    import threading

    looked = threading.Barrier(SIZE)  # both others have asked before the last rank calls

    def play(rank: int) -> float:
        if rank == 2:
            looked.wait(40)
            return float(ddl.allreduce(own(rank), name="x")[0])
        handle = ddl.allreduce_async(own(rank), name="x")
        assert not ddl.poll(handle)
        looked.wait(40)
        result = float(ddl.synchronize(handle)[0])
        assert ddl.poll(handle)
        return result

    assert ranks(play) == [2.0] * SIZE


def test_allgather() -> None:
    """Ranks may give different numbers of rows, or none; the result is in rank order, also in a group."""

    def play(rank: int) -> Any:
        first = ddl.allgather(own(rank, rank, 2))
        second = ddl.synchronize(ddl.allgather_async(own(rank, rank), name="a"))
        third = ddl.grouped_allgather([own(rank, 1), own(rank, rank)])
        fourth = ddl.synchronize(ddl.grouped_allgather_async([own(rank, 1)]))
        return first.tolist(), second.tolist(), [t.tolist() for t in third], fourth[0].tolist()

    rows = [2.0, 3.0, 3.0]
    expected = ([[value] * 2 for value in rows], rows, [[1.0, 2.0, 3.0], rows], [1.0, 2.0, 3.0])
    assert ranks(play) == [expected] * SIZE


def test_broadcast() -> None:
    """Broadcast returns a new tensor; the root is a rank of the world, even in a process set."""

    def play(rank: int) -> list[float]:
        pair = ddl.add_process_set([1, 2])
        x = own(rank)
        out = [ddl.broadcast(x, 2)[0].item(), ddl.synchronize(ddl.broadcast_async(x, 0))[0].item()]
        if rank:
            out.append(ddl.broadcast(x, 2, process_set=pair)[0].item())
            with pytest.raises(ValueError, match="root_rank=0"):
                ddl.broadcast(x, 0, process_set=pair)
        else:
            with pytest.raises(ValueError, match="member"):
                ddl.broadcast(x, 1, process_set=pair)
        assert x.tolist() == own(rank).tolist()
        return out

    assert ranks(play) == [[3.0, 1.0], [3.0, 1.0, 3.0], [3.0, 1.0, 3.0]]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_alltoall(as_tensor: bool) -> None:
    """Without splits only the rows are returned; with splits also how many came from each rank."""

    def play(rank: int) -> Any:
        rows = torch.arange(6.0) + 10 * rank
        given: Any = [rank, 1, 5 - rank]
        if as_tensor:
            given = torch.tensor(given, dtype=torch.int32)
        equal = ddl.alltoall(rows)
        waited = ddl.synchronize(ddl.alltoall_async(rows))
        out, received = ddl.alltoall(rows, given)
        later, also = ddl.synchronize(ddl.alltoall_async(rows, given))
        assert received.dtype is torch.int32
        assert waited.tolist() == equal.tolist()
        assert (later.tolist(), also.tolist()) == (out.tolist(), received.tolist())
        return equal.tolist(), out.tolist(), received.tolist()

    assert ranks(play) == [
        ([0, 1, 10, 11, 20, 21], [10, 20, 21], [0, 1, 2]),
        ([2, 3, 12, 13, 22, 23], [0, 11, 22], [1, 1, 1]),
        ([4, 5, 14, 15, 24, 25], [1, 2, 3, 4, 5, 12, 13, 14, 15, 23, 24, 25], [5, 4, 3]),
    ]


def test_alltoall_in_a_process_set() -> None:
    """Splits and received splits count the members of the set, not of the world."""

    def play(rank: int) -> Any:
        pair = ddl.add_process_set([0, 2])
        if rank == 1:
            return None
        out, received = ddl.alltoall(own(rank, 3), [1, 2], process_set=pair)
        return out.tolist(), received.tolist()

    assert ranks(play) == [([1.0, 3.0], [1, 1]), None, ([1.0, 1.0, 3.0, 3.0], [2, 2])]


def test_reducescatter() -> None:
    """The default is the average; four rows on three ranks are divided into 2, 1 and 1; scales and groups work."""

    def play(rank: int) -> Any:
        x = torch.arange(4.0) * (rank + 1)
        one = ddl.reducescatter(x)
        two = ddl.reducescatter(x, "name", ddl.Compression.none, ddl.Sum, prescale_factor=2.0)
        three = ddl.grouped_reducescatter([x, x], op=ddl.Sum)
        four = ddl.synchronize(ddl.reducescatter_async(x, op=ddl.Sum, postscale_factor=2.0))
        five = ddl.synchronize(ddl.grouped_reducescatter_async([x], op=ddl.Sum))
        assert two.tolist() == four.tolist()
        assert three[0].tolist() == three[1].tolist() == five[0].tolist()
        return one.tolist(), two.tolist(), five[0].tolist()

    assert ranks(play) == [
        ([0.0, 2.0], [0.0, 12.0], [0.0, 6.0]),
        ([4.0], [24.0], [12.0]),
        ([6.0], [36.0], [18.0]),
    ]


def test_channels_last_allreduce_keeps_the_layout() -> None:
    """Elementwise collectives accept any dense layout and keep it in the result."""

    def play(rank: int) -> None:
        x = own(rank, 2, 3, 4, 5).to(memory_format=torch.channels_last)
        assert ddl.allreduce(x).stride() == x.stride()
        assert ddl.broadcast(x, 1).stride() == x.stride()

    ranks(play)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_floats_are_added_in_float32(dtype: torch.dtype) -> None:
    """256 + 1 + 1 is rounded once; if bfloat16 were added in 16 bits, it would stay at 256."""

    def play(rank: int) -> float:
        x = torch.tensor([256.0 if rank == 0 else 1.0], dtype=dtype)
        return float(ddl.allreduce(x, op=ddl.Sum))

    assert ranks(play) == [258.0] * SIZE


def test_average_is_deprecated() -> None:
    """The old argument ``average`` works, warns, and cannot be combined with ``op``."""

    def play(rank: int) -> list[float]:
        with pytest.warns(DeprecationWarning, match="average"):
            mean = ddl.allreduce(own(rank), average=True)
        with pytest.warns(DeprecationWarning, match="average"):
            total = ddl.allreduce_(own(rank), False)
        with pytest.raises(ValueError, match="The op parameter supersedes average"):
            ddl.allreduce(own(rank), average=True, op=ddl.Sum)
        return [mean[0].item(), total[0].item()]

    # Catching warnings affects the whole process, so only one rank may do it.
    assert run_world(1, lambda rank, job: play(rank)) == [[1.0, 1.0]]


def test_refusals() -> None:
    """Invalid arguments raise ValueError at the call, on the calling rank only, and the job goes on."""

    def play(rank: int) -> float:
        x = own(rank)
        wrong: list[tuple[Any, str]] = [
            (lambda: ddl.allreduce(x, op=ddl.Adasum), "not supported here, but by ddl-horovod"),
            (lambda: ddl.reducescatter(x, op=ddl.Adasum), "not supported here, but by ddl-horovod"),
            (lambda: ddl.allreduce(x, op=17), "17"),
            (lambda: ddl.allreduce(torch.zeros(3, dtype=torch.complex64).conj()), "resolve_conj"),
            (lambda: ddl.allreduce(torch.zeros(3, dtype=torch.uint32)), "uint32 can be gathered"),
            (lambda: ddl.allgather(torch.zeros(4, 4).t()[:2]), "contiguous"),
            (lambda: ddl.alltoall(x, torch.tensor([[1, 2, 1]])), "one-dimensional"),
            (lambda: ddl.alltoall(x, torch.tensor([1.0, 2.0, 1.0])), "integers"),
            (lambda: ddl.alltoall(x, [1, 1, 1]), "splits"),
            (lambda: ddl.alltoall(x), "splits"),
            (lambda: ddl.broadcast(x, 3), "root_rank=3"),
            (lambda: ddl.allreduce(x, compression=3), "Compression"),
            (lambda: ddl.allreduce(x, compression="gzip"), "gzip"),
            (lambda: ddl.allreduce(x, process_set=ddl.ProcessSet([0, 1])), "not registered"),
            (lambda: ddl.synchronize(3), "no handle"),  # type: ignore[arg-type]
            (lambda: ddl.poll(None), "no handle"),  # type: ignore[arg-type]
        ]
        for call, text in wrong:
            with pytest.raises(ValueError, match=text):
                call()
        return float(ddl.allreduce(x)[0])

    assert ranks(play) == [2.0] * SIZE


def test_a_name_in_flight() -> None:
    """A second call with a name in flight is refused; the first goes on."""

    def play(rank: int) -> float:
        if rank == 0:
            handle = ddl.allreduce_async(own(rank), name="x")
            with pytest.raises(ValueError, match="x"):
                ddl.allreduce_async(own(rank), name="x")
        ddl.barrier()
        return float((ddl.synchronize(handle) if rank == 0 else ddl.allreduce(own(rank), name="x"))[0])

    assert ranks(play) == [2.0] * SIZE


def test_join() -> None:
    """A rank without data takes part in the others' collectives; averages divide by the ranks that contribute."""

    def play(rank: int) -> Any:
        done = [float(ddl.allreduce(own(rank), name=f"step {step}")[0]) for step in range(rank + 1)]
        return done, ddl.join() in range(SIZE)

    assert ranks(play) == [
        ([2.0], True),
        ([2.0, 2.5], True),
        ([2.0, 2.5, 3.0], True),
    ]
