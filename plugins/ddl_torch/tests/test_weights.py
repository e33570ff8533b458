"""Weights of torch's verbs and optimizers: the average over all rows or tokens, of all ranks and passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_torch import elastic
from torch.utils.data import DataLoader, TensorDataset

from ddlcore.errors import InvalidArgument
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.training import Network, differences, parameters

pytestmark = pytest.mark.timeout(240)

TOKENS = ((3, 7, 0), (40, 1, 5), (2, 2, 9), (1, 6, 3))  # [step][rank]
OVERLAP = pytest.mark.parametrize("overlap", ["off", "on"])


def rows_of(step: int, rank: int, count: int, kind: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 9, generator=random, dtype=torch.float64).to(kind)  # inputs and targets


def summed(model: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(rows[:, :6]) - rows[:, 6:]).square().sum()
    return loss


def mean(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """The mean over the rows; NaN if there is none, as usual."""
    return summed(model, rows) / len(rows) if len(rows) else summed(model, rows) * float("nan")


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def alone(steps: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """One process trains on the rows of all ranks and passes of each step."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parts in steps:
        optimizer.zero_grad()
        backward(mean(model, torch.cat(parts)))
        optimizer.step()
    return parameters(model)


def made(model: Any, **options: Any) -> Any:
    bare = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options.setdefault("weight", 1)
    return ddl.DistributedOptimizer(bare, model.named_parameters(), **options)


def check(
    play: Callable[[Any, Any, int, int, int], None],
    steps: list[list[torch.Tensor]],
    size: int = 3,
    overlap: str = "off",
    **options: Any,
) -> list[Any]:
    """Have ``play(model, optimizer, step, rank, size)`` train on all ranks, and compare with one process."""
    wanted = alone(steps)

    def run(rank: int, job: Any) -> list[torch.Tensor]:
        model = Network()
        optimizer = made(model, **options)
        for step in range(len(steps)):
            play(model, optimizer, step, rank, size)
        return parameters(model)

    results = run_world(size, run, settings={"overlap": overlap})
    for rank, found in enumerate(results):
        assert differences(wanted, found) <= 1e-10, f"rank {rank} of {size} is away from one process"
        assert differences(found, results[0]) == 0.0, f"ranks 0 and {rank} differ"
    return results


@OVERLAP
@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=["each", "groups"])
def test_uneven_tokens(overlap: str, options: dict[str, Any]) -> None:
    """The weight is set before each pass; a rank without tokens has a loss of NaN, which counts nothing."""

    def play(model: Any, optimizer: Any, step: int, rank: int, size: int) -> None:
        optimizer.zero_grad()
        optimizer.weight = torch.tensor(TOKENS[step][rank])
        backward(mean(model, rows_of(step, rank, TOKENS[step][rank])))
        optimizer.step()

    steps = [[rows_of(step, rank, count) for rank, count in enumerate(each)] for step, each in enumerate(TOKENS)]
    check(play, steps, overlap=overlap, **options)


def counts_of(step: int, rank: int) -> list[int]:
    return [(5 * step + 3 * rank + 4 * turn) % 7 for turn in range(3)]


@OVERLAP
@pytest.mark.parametrize("way", ["passes", "no_sync", "no last pass"])
@pytest.mark.parametrize("size", [1, 3])
def test_accumulation_with_unequal_tokens(way: str, size: int, overlap: str) -> None:
    """Three passes a step, each with another number of tokens on each rank: the average is that over all of them."""

    def play(model: Any, optimizer: Any, step: int, rank: int, size: int) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for turn, count in enumerate(counts_of(step, rank)):
            loss = mean(model, rows_of(3 * step + turn, rank, count))
            optimizer.weight = count
            if way == "passes" or (way == "no_sync" and turn == 2):
                backward(loss)
            else:
                with optimizer.no_sync():
                    backward(loss)
        optimizer.step()

    steps = [
        [
            rows_of(3 * step + turn, rank, count)
            for rank in range(size)
            for turn, count in enumerate(counts_of(step, rank))
        ]
        for step in range(4)
    ]
    check(play, steps, size, overlap, backward_passes_per_step=3 if way == "passes" else 1)


@OVERLAP
def test_results_stay_beside_later_passes(overlap: str) -> None:
    """Two losses a step, the second accumulated: .grad is the sum of two averages, each with its own weights."""

    def run(rank: int, job: Any) -> None:
        model = Network()
        optimizer = made(model)
        for step in range(3):
            optimizer.zero_grad()
            expected = Network()
            expected.load_state_dict(model.state_dict())
            counts = [[3 + rank_ + turn for turn in range(3)] for rank_ in range(2)]
            everyone = [[rows_of(step, 10 * r + t, counts[r][t]) for t in range(3)] for r in range(2)]
            backward(mean(expected, torch.cat([everyone[r][0] for r in range(2)])))
            backward(mean(expected, torch.cat([everyone[r][t] for r in range(2) for t in (1, 2)])))
            for turn, rows in enumerate(everyone[rank]):
                optimizer.weight = len(rows)
                if turn == 1:
                    with optimizer.no_sync():
                        backward(mean(model, rows))
                else:
                    backward(mean(model, rows))
            for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=1e-12)
            optimizer.step()

    run_world(2, run, settings={"overlap": overlap})


DATA = torch.randn(46, 9, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("batch", [7, 2])
def test_the_same_steps_on_any_number_of_ranks(batch: int, ahead: int) -> None:
    """Global batches and shares: step k gives the same parameters with 1, 2 and 3 ranks, also if a rank has no row.

    A loader may draw batches ahead, as one with workers does. Workers would be forked here by several threads at a time,
    from a process that has many more: tests with processes use them.
    """
    order = elastic.GlobalBatchSampler(len(DATA), batch, seed=2)
    wanted: list[list[torch.Tensor]] = []

    def alone() -> None:
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for rows in _batches(order):
            optimizer.zero_grad()
            backward(mean(model, DATA[rows]))
            optimizer.step()
            wanted.append(parameters(model))

    alone()

    def run(rank: int, job: Any) -> list[list[torch.Tensor]]:
        model = Network()
        sampler = elastic.GlobalBatchSampler(DATA, batch, seed=2)
        optimizer = made(model, weight=sampler.share)
        found = []
        for (rows,) in drawn_ahead(DataLoader(TensorDataset(DATA), batch_sampler=sampler), ahead):
            optimizer.zero_grad()
            backward(mean(model, rows))
            optimizer.step()
            sampler.record_batch()
            found.append(parameters(model))
        assert len(sampler) == 0
        return found

    for size in (1, 2, 3):
        for found in run_world(size, run):
            assert len(found) == len(wanted) == -(-len(DATA) // batch)
            for step, (one, other) in enumerate(zip(wanted, found, strict=True)):
                assert differences(one, other) <= 1e-10, f"step {step} of {size} ranks"


def drawn_ahead(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield what ``loader`` yields, and have it draw up to ``count`` batches before they are needed."""
    drawn: deque[Any] = deque()
    for batch in loader:
        drawn.append(batch)
        if len(drawn) > count:
            yield drawn.popleft()
    yield from drawn


def _batches(sampler: Any) -> list[list[int]]:
    rest = sampler._after(sampler.processed_num)
    return [rest[at : at + sampler.global_batch] for at in range(0, len(rest), sampler.global_batch)]


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("kind", ["tokens", "shares", "passes"])
def test_steady_steps_send_nothing(kind: str, overlap: str) -> None:
    """Replay goes on with weights that change in each step: no control message (until a rank leaves, at the end)."""
    passes = 2 if kind == "passes" else 1

    def run(rank: int, job: Any) -> tuple[int, int]:
        model = Network()
        optimizer = made(model, backward_passes_per_step=passes)
        counts = []
        for step in range(40):
            optimizer.zero_grad()
            for turn in range(passes):
                count = 1 + (step + rank + turn) % 5
                optimizer.weight = ddl.Share(1 + rank, 3, 2) if kind == "shares" else count
                backward(mean(model, rows_of(step, rank, count)))
            optimizer.step()
            counts.append(job.stats()["control_messages"])
        return counts[-3] - counts[15], job.stats()["buckets_replayed"]

    for messages, replayed in run_world(2, run, settings={"replay": True, "overlap": overlap}):
        assert messages == 0
        assert replayed > 0


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        (torch.float32, {}, 1e-5),
        (torch.bfloat16, {}, 3e-2),
        (torch.float16, {}, 4e-3),
        (torch.float32, {"compression": ddl.Compression.fp16}, 4e-3),
        (torch.float32, {"compression": "bf16"}, 3e-2),
    ],
    ids=["f32", "bf16", "f16", "compressed f16", "compressed bf16"],
)
def test_types(kind: torch.dtype, options: dict[str, Any], tolerance: float) -> None:
    """Counts of thousands of tokens do not overflow 16 bits from the second step on."""
    counts = (4000, 9000)

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.zeros(64, dtype=kind))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=1, **options)
        for step in range(4):
            values = [rows_of(step, r, 8).flatten()[:64].to(kind) * (1 if step == 0 else 100) for r in range(2)]
            optimizer.zero_grad()
            optimizer.weight = counts[rank]
            (param * values[rank]).sum().backward()
            wanted: Any = sum(c * v.double() for c, v in zip(counts, values)) / sum(counts)
            assert param.grad is not None and param.grad.dtype == kind
            scale = wanted.abs().max().item()
            torch.testing.assert_close(param.grad.double() / scale, wanted / scale, rtol=0, atol=tolerance)
            optimizer.step()

    run_world(2, run)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients(dense: bool, passes: int) -> None:
    """They are gathered, or made dense, with their weights."""

    def run(rank: int, job: Any) -> None:
        table = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            table.weight.zero_()
        bare = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer: Any = ddl.DistributedOptimizer(
            bare, table.named_parameters(), sparse_as_dense=dense, weight=1, backward_passes_per_step=passes
        )
        for step in range(3):
            optimizer.zero_grad()
            wanted = torch.zeros(6, 2, dtype=torch.float64)
            total = 0.0
            for turn in range(passes):
                for one in range(2):
                    weight, word = 1 + 2 * one + turn + step, (step + one + turn) % 6
                    wanted[word] += weight * (one + 1)
                    total += weight
                    if one == rank:
                        optimizer.weight = weight
                        (table(torch.tensor([word])) * (one + 1)).sum().backward()
            grad = table.weight.grad
            assert grad is not None
            torch.testing.assert_close(grad.to_dense(), wanted / total, rtol=0, atol=1e-12)
            optimizer.step()

    run_world(2, run)


def test_gradients_that_share_memory() -> None:
    """Autograd gives both parameters one gradient: it is multiplied once."""

    def run(rank: int, job: Any) -> None:
        one, other = (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([one, other], lr=1.0), weight=1)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.weight = 1 + 2 * rank
            ((one.view(-1) + other.view(-1)) * float(1 + rank)).sum().backward()
            assert one.grad is not None and other.grad is not None
            assert one.grad.tolist() == other.grad.tolist() == [1.75] * 4, f"step {step}"
            optimizer.step()

    run_world(2, run)


def test_a_rank_without_a_pass_has_no_weight() -> None:
    """It takes part by step(), with zeros."""

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=4)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0 or step == 1:
                (param * 5.0).sum().backward()
            optimizer.step()
            assert param.tolist() == [-5.0 * (step + 1)] * 3

    run_world(2, run)


def test_all_weights_zero_is_an_error_on_all_ranks() -> None:
    """Nothing is applied; the program may clear the gradients and go on."""

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=0)
        with pytest.raises(InvalidArgument, match="weights of all ranks are 0"):
            (param * 5.0).sum().backward()
        with pytest.raises(InvalidArgument, match="weights of all ranks are 0"):
            optimizer.step()
        assert param.tolist() == [1.0] * 3
        optimizer.zero_grad()
        optimizer.weight = lambda: rank
        (param * 5.0).sum().backward()
        optimizer.step()
        assert param.tolist() == [-4.0] * 3

    run_world(2, run)


def test_wrong_use_is_told() -> None:
    """At the call that is wrong, by name."""

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.ones(3))

        def wrap(kind: Any = torch.optim.SGD, **options: Any) -> Any:
            return ddl.DistributedOptimizer(kind([param], lr=1.0), **options)

        for options, text in (
            ({"weight": -1}, "not negative"),
            ({"weight": "1"}, "is a str"),
            ({"weight": 1, "op": ddl.Sum}, "op=Sum"),
            ({"weight": 1, "gradient_predivide_factor": 2.0}, "prescale_factor=0.5"),
            ({"weight": 1, "kind": torch.optim.LBFGS}, "L-BFGS"),
            ({"weight": ddl.Share(1, 2, 5)}, "for 5 ranks"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                wrap(**options)
        with pytest.raises(InvalidArgument, match="averages without weights"):
            wrap().weight = 2
        optimizer = wrap(weight=1)
        for weight in (float("nan"), float("inf"), -2, torch.ones(2), None):
            with pytest.raises(InvalidArgument, match="weight"):
                optimizer.weight = weight
        (param * 2.0).sum().backward()
        optimizer.step()
        optimizer.weight = ddl.Share(1, 2, 2)
        with pytest.raises(InvalidArgument, match="is a Share and was a number"):
            (param * 2.0).sum().backward()

    run_world(2, run)


def test_the_verbs() -> None:
    """New tensors, in place, groups, with a gradient, of every type; and what is refused."""

    def run(rank: int, job: Any) -> None:
        weight = (1, 3)[rank]
        for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.full((3,), 8.0 * (rank + 1), dtype=kind)
            wanted = [14.0] * 3
            for one in (weight, ddl.Share(weight, 4, 2)):
                assert ddl.allreduce(x, weight=one).tolist() == wanted
                assert ddl.allreduce_async(x, weight=one).wait().tolist() == wanted
                assert ddl.allreduce_(x.clone(), weight=one).tolist() == wanted
                into = x.clone()
                assert ddl.synchronize(ddl.allreduce_async_(into, name="a", weight=one)) is into
                assert into.tolist() == wanted and into.dtype == kind
                pair = ddl.grouped_allreduce([x, x * 2], weight=one)
                assert [p.tolist() for p in pair] == [wanted, [28.0] * 3]
                assert ddl.grouped_allreduce_async([x], weight=one).wait()[0].tolist() == wanted
                group = [x.clone()]
                assert ddl.grouped_allreduce_(group, weight=one)[0] is group[0]
                assert group[0].tolist() == wanted
                assert ddl.synchronize(ddl.grouped_allreduce_async_([x.clone()], weight=one))[0].tolist() == wanted
        leaf = torch.full((2,), 1.0 + rank, requires_grad=True)
        for one in (weight, ddl.Share(weight, 4, 2), rank):
            averaged = ddl.allreduce(leaf, weight=one)
            (gradient,) = torch.autograd.grad(averaged, leaf, torch.full((2,), 10.0 * (rank + 1)))
            factor = float(rank) if one is rank else weight / 4
            assert gradient.tolist() == [30.0 * factor] * 2
        with pytest.raises(InvalidArgument, match="not int64"):
            ddl.allreduce(torch.ones(2, dtype=torch.int64), weight=1)
        with pytest.raises(InvalidArgument, match="op=Sum"):
            ddl.allreduce_async(torch.ones(2), op=ddl.Sum, weight=1)
        with pytest.raises(InvalidArgument, match="compression='fp16'"):
            ddl.allreduce(torch.ones(2), compression=ddl.Compression.fp16, weight=1)
        half = ddl.allreduce(torch.full((2,), 4.0 * rank), compression=ddl.Compression.fp16, weight=ddl.Share(1, 2, 2))
        assert half.tolist() == [2.0, 2.0]

    run_world(2, run)


@OVERLAP
def test_ranks_that_have_joined(overlap: str) -> None:
    """Ranks with less data join: the others average by their own weights, or by how many they are."""

    def run(rank: int, job: Any) -> None:
        params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
        bare = [torch.optim.SGD([param], lr=1.0) for param in params]
        weighted: Any = ddl.DistributedOptimizer(bare[0], [("weighted", params[0])], weight=1)
        plain = ddl.DistributedOptimizer(bare[1], [("plain", params[1])])
        for step in range(4 + 4 * rank):
            ranks = [r for r in range(3) if step < 4 + 4 * r]
            for optimizer in (weighted, plain):
                optimizer.zero_grad()
            weighted.weight = 1 + rank + step
            for param in params:
                (param * float(rank)).sum().backward()
            wanted = sum(r * (1 + r + step) for r in ranks) / sum(1 + r + step for r in ranks)
            found = [param.grad.tolist() if param.grad is not None else [] for param in params]
            assert found[0] == pytest.approx([wanted] * 3, abs=1e-12)
            assert found[1] == pytest.approx([sum(ranks) / len(ranks)] * 3, abs=1e-12)
            for optimizer in (weighted, plain):
                optimizer.step()
        ddl.join()

    run_world(3, run, settings={"overlap": overlap})


def test_shares_do_not_add_up_after_join() -> None:
    """That is an error by name, not another average."""

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=ddl.Share(1, 3, 3))
        if rank:
            with pytest.raises(ddl.MismatchError, match="rank 0 has joined, so the shares"):
                (param * 2.0).sum().backward()
            with pytest.raises(ddl.MismatchError, match="rank 0 has joined"):
                optimizer.step()
            assert param.tolist() == [0.0] * 3
        ddl.join()

    run_world(3, run)


def test_a_step_without_backward() -> None:
    """On all ranks, it takes the same gradients again, as without weights; with a share of rows, it is an error."""

    def run(rank: int, job: Any) -> None:
        param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=1 + rank)
        (param * 3.0 * rank).sum().backward()
        optimizer.step()
        optimizer.step()
        assert param.tolist() == pytest.approx([-4.0] * 2)
        shared: Any = ddl.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), weight=ddl.Share(rank, 1, 2))
        shared.zero_grad()
        if rank == 1:
            (param * 2.0).sum().backward()
        shared.step()
        assert param.tolist() == pytest.approx([-6.0] * 2)
        if rank == 1:
            with pytest.raises(InvalidArgument, match=r"without backward\(\), and this rank has Share"):
                shared.step()

    run_world(2, run)
