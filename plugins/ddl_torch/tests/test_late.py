"""Tests tensors on a device that computes later than torch believes: every missing fence shows as a wrong value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_conform.pretend_world import PretendWorld
from ddl_torch.autograd import ADAPTER
from torch import nn

from ddlcore.errors import PluginError
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.late_streams import LateStreams
from plugins.ddl_torch.tests.training import STEPS, Part, backward, differences, parameters

pytestmark = pytest.mark.timeout(270)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStreams]:
    streams = LateStreams()
    monkeypatch.setattr(ADAPTER, "streams", streams)
    yield streams
    streams.close()


def on_ranks(late: LateStreams, play: Callable[[int], Any], size: int = 2, **options: Any) -> list[Any]:
    """Run ``play`` on every rank; the tensors of each rank are on a device of its own."""

    def on_device(rank: int, job: Any) -> Any:
        late.settle_on(rank)
        return play(rank)

    with PretendWorld(size, **options) as world:
        return world.run(on_device, last=True, deadline_s=60.0)


ROUTES = [{}, {"backend": "threads"}, {"route": "cpu"}]
ROUTE_IDS = ["told by shm", "told by the device", "staged on the host"]


def late_part(late: LateStreams, rank: int, size: int, kind: torch.dtype = torch.float64) -> Part:
    """Return what a rank trains; its gradients are computed late, except in the one process to compare with."""
    part = Part(rank, size, kind)
    if size > 1:
        late.put_off_gradients(part.model.parameters())
    return part


def agree(late: LateStreams, train: Callable[[Part], Any], make: Any = late_part, **options: Any) -> list[Any]:
    """Compare each rank's parameters with those of one process; return what ``train`` returned on each rank.

    Raises AssertionError if they differ.
    """
    alone = make(late, 0, 1)
    train(alone)

    def play(rank: int) -> tuple[Any, list[torch.Tensor], int]:
        part = make(late, rank, 2)
        return train(part), parameters(part.model), ddl.stats()["buckets_replayed"]

    found = on_ranks(late, play, **options)
    for _, ours, replayed in found:
        assert differences(ours, parameters(alone.model)) < 1e-6
        assert replayed > 0
    return [result for result, _, _ in found]


def plain(part: Part, **options: Any) -> torch.optim.Optimizer:
    optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1, momentum=0.9), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(part.loss(step))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("seen", [False, True], ids=["in place", "seen by others"])
@pytest.mark.parametrize("options", ROUTES, ids=ROUTE_IDS)
def test_training(late: LateStreams, options: dict[str, Any], seen: bool) -> None:
    """Discovery and replay give the same parameters as one process, and each gradient uses one mark."""

    def make(late: LateStreams, rank: int, size: int) -> Part:
        part = Part(rank, size)
        if size > 1:
            late.put_off_gradients(part.model.parameters(), seen)
        return part

    def train(part: Part) -> None:
        begun = late.marks
        plain(part)
        if part.size > 1:
            # Of both ranks' six gradients, and the first time one to describe it, and its result where that lies apart.
            assert late.marks - begun <= 2 * (3 if seen else 2) * 6

    agree(late, train, make, **options)


@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"gradient_predivide_factor": 4.0}, {"device_dense": "cpu"}],
    ids=["groups", "predivide", "asked off"],
)
def test_options(late: LateStreams, options: dict[str, Any]) -> None:
    """The other ways of the reducer are fenced too; a group uses pooled marks."""
    agree(late, lambda part: plain(part, **options))


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_gradients_come_on_several_streams(late: LateStreams, groups: int | None) -> None:
    """Gradients may be computed on different streams; torch calls each hook on the stream of its gradient."""

    def make(late: LateStreams, rank: int, size: int) -> Part:
        part = Part(rank, size)
        if size > 1:
            for i, parameter in enumerate(part.model.parameters()):
                parameter.register_post_accumulate_grad_hook(lambda _, i=i: late.turn_to(i % 3))
            late.put_off_gradients(part.model.parameters())
        return part

    agree(late, lambda part: plain(part, groups=groups), make)


def test_two_devices(late: LateStreams) -> None:
    """If a module's parameters are on two devices, no bucket mixes them, and the streams of both wait."""

    def make(late: LateStreams, rank: int, size: int) -> Part:
        part = Part(rank, size)
        part.model.left.to(torch.float32)
        part.model.right.to(torch.float32)
        part.model.body.register_forward_hook(lambda module, given, result: result.to(torch.float32))
        if size > 1:
            late.put_off_gradients(part.model.parameters())
        return part

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1))
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = part.batch(step)
            hidden = torch.tanh(part.model.body(x))
            backward(nn.functional.mse_loss(part.model.left(hidden) + part.model.right(hidden), y.float()))
            optimizer.step()

    agree(late, train, make)


def test_a_rank_without_a_gradient(late: LateStreams) -> None:
    """A rank without a gradient takes part with zeros, made on the device."""

    def train(part: Part) -> None:
        optimizer = part.wrap(torch.optim.SGD(part.model.parameters(), lr=0.1))
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank, (x, y) in part.mine(step):
                backward(nn.functional.mse_loss(part.model(x, use_right=rank == 0), y) * part.share())
            optimizer.step()

    agree(late, train)


def test_sparse_gradients(late: LateStreams) -> None:
    """Sparse gradients are gathered on the device, or through host memory if that is asked for."""

    def play(rank: int) -> list[list[float]]:
        found = []
        for device_sparse in ("", "cpu"):
            table = nn.Embedding(4, 1, sparse=True, dtype=torch.float64)
            nn.init.zeros_(table.weight)
            optimizer: Any = ddl.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=1.0), op=ddl.Sum, device_sparse=device_sparse
            )
            for _ in range(3):
                optimizer.zero_grad()
                backward(table(torch.tensor([rank, 2])).sum())
                optimizer.step()
            found.append(table.weight.flatten().tolist())
        return found

    for found in on_ranks(late, play):
        assert found == [[-3.0, -3.0, -6.0, 0.0]] * 2


def test_verbs(late: LateStreams) -> None:
    """Each collective is right on a tensor whose values are late, and streams wait before results are read."""

    class Doubled:
        """A compressor of a user's own, whose product is computed late."""

        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return late.put_off(tensor * 2), None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor / 2

    def play(rank: int) -> None:
        def made(rows: int = 2) -> torch.Tensor:
            return late.put_off(torch.full((rows, 3), rank + 1.0, dtype=torch.float64))

        for _ in range(4):
            assert ddl.allreduce(made(), op=ddl.Sum).unique().tolist() == [3.0]
            tensor = made()
            assert ddl.allreduce_(tensor, op=ddl.Sum, name="in place") is tensor
            assert tensor.unique().tolist() == [3.0]
            handle = ddl.allreduce_async(made(), op=ddl.Max)
            assert ddl.synchronize(handle).unique().tolist() == [2.0]
            assert ddl.poll(handle)
            first, second = ddl.grouped_allreduce([made(), made(5)], op=ddl.Sum)
            assert (first.unique().tolist(), second.unique().tolist()) == ([3.0], [3.0])
            assert ddl.broadcast(made(), 1).unique().tolist() == [2.0]
            assert ddl.allgather(made(1 + rank))[:, 0].tolist() == [1.0, 2.0, 2.0]
            assert ddl.alltoall(made())[:, 0].tolist() == [1.0, 2.0]
            assert ddl.reducescatter(made(), op=ddl.Sum).unique().tolist() == [3.0]
            halves = ddl.allreduce(made(), op=ddl.Sum, compression=ddl.Compression.fp16)
            assert (halves.dtype, halves.unique().tolist()) == (torch.float64, [3.0])
            plain = torch.full((2, 3), rank + 1.0, dtype=torch.float64)
            assert ddl.allreduce(plain, op=ddl.Sum, compression=Doubled).unique().tolist() == [3.0]

    on_ranks(late, play)
    assert late.followed > 0


def test_a_group_over_two_devices(late: LateStreams) -> None:
    """A group over two devices raises a clear error before anything is sent."""

    def play(rank: int) -> None:
        tensors = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
        with pytest.raises(ValueError, match="lie on pretend:"):
            ddl.grouped_allreduce(tensors)
        assert ddl.allreduce(torch.ones(1), op=ddl.Sum).tolist() == [2.0]

    on_ranks(late, play)


def test_state_and_batch_norm(late: LateStreams) -> None:
    """Parameters, optimizer state and batch statistics become equal on all ranks."""

    def play(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), ddl.SyncBatchNorm(3).double())
        adam = torch.optim.Adam(model.parameters())
        backward(model(torch.randn(5, 4, dtype=torch.float64)).square().sum())
        adam.step()
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                late.put_off(tensor)
        ddl.broadcast_parameters(model.state_dict(), 1)
        ddl.broadcast_optimizer_state(adam, 1)
        state = [value for each in adam.state.values() for value in each.values()]
        return [tensor.double().clone() for tensor in [*model.state_dict().values(), *state]]

    one, other = on_ranks(late, play)
    assert differences(one, other) == 0.0


def test_a_device_that_nothing_serves(late: LateStreams) -> None:
    """If no transport serves a device, the optimizer and each collective say so in one line."""

    def play(rank: int, job: Any) -> None:
        late.settle_on(rank)
        model = nn.Linear(2, 2)
        with pytest.raises(PluginError, match="memory of pretend cannot be used"):
            ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(PluginError, match="memory of pretend cannot be used"):
            ddl.allreduce(torch.ones(2))

    run_world(2, play)


def test_devices_are_numbered_as_the_parameters_stand(late: LateStreams) -> None:
    """Devices are numbered in the order of the parameters, not of the hooks, which run on a thread for each device."""

    def play(rank: int) -> list[str]:
        wide, narrow = (nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.float32))
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([narrow, wide], lr=0.1))
        job = optimizer._ddl.job
        return [job.device_label(late.place(parameter)) for parameter in (narrow, wide)]

    assert on_ranks(late, play) == [["pretend", "pretend+1"]] * 2
