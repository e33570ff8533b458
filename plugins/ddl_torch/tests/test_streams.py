"""Tests which CUDA calls are made and in which order: marks on the producing stream, waits on the consuming one."""

from __future__ import annotations

import gc
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from ddl_torch.adapter import TorchAdapter
from ddl_torch.autograd import OPERATIONS

from ddlcore.errors import DeviceError
from ddlcore.testing import World
from ddlcore.types import CPU, Device
from plugins.ddl_torch.tests.fake_cuda import FakeCuda, FakeStream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def adapter(cuda: FakeCuda) -> TorchAdapter:
    adapter = TorchAdapter()
    adapter.streams = cuda.streams()
    return adapter


def test_host_memory_asks_nothing(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """A CPU tensor has no event, and none is created for it."""
    tensor = torch.zeros(3)
    buffer = adapter.buffer(tensor, elementwise=True)
    assert (buffer.device, buffer.event, buffer.stream, buffer.order) == (CPU, 0, 0, 0)
    assert isinstance(buffer.owner, torch.UntypedStorage), "what keeps the memory alive, whatever the tensor gets"
    assert buffer.owner.data_ptr() == tensor.data_ptr()
    assert cuda.made == 0


def test_a_buffer_has_its_event(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """The event is recorded on the device's current stream when the buffer is made.

    Later events of a stream have greater numbers.
    """
    first = adapter.buffer(cuda.on(1, torch.zeros(3)), elementwise=True)
    second = adapter.buffer(cuda.on(1, torch.zeros(4)), elementwise=True)
    assert first.device == second.device == Device("cuda", 1)
    assert cuda.notes == [("record", first.event, 1, 0x70), ("record", second.event, 1, 0x70)]
    assert (first.stream, second.stream) == (0x70, 0x70)
    assert 0 < first.order < second.order
    assert first.event != second.event


def test_the_stream_is_the_one_of_the_moment(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """A buffer is marked on the stream that is current when it is made, even if the user has switched streams."""
    tensor = cuda.on(0, torch.zeros(3))
    assert adapter.buffer(tensor, elementwise=True).stream == 0  # the default stream
    cuda.current[0] = FakeStream(cuda, 0, 0x50)
    assert adapter.buffer(tensor, elementwise=True).stream == 0x50


def test_events_come_back(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """The event of a freed buffer is used again for another buffer; the event of a buffer that is still held is not."""
    held = adapter.buffer(cuda.on(0, torch.zeros(3)), elementwise=True)
    for _ in range(20):
        adapter.buffer(cuda.on(0, torch.zeros(3)), elementwise=True)
        gc.collect(0)
    assert cuda.made == 2
    handles = {note[1] for note in cuda.notes[1:]}
    assert len(handles) == 1
    assert held.event not in handles


def test_events_stay_on_their_device(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """An event is reused on its own device only, because CUDA cannot record it on a stream of another device."""
    for _ in range(3):
        for index in (0, 1):
            adapter.buffer(cuda.on(index, torch.zeros(3)), elementwise=True)
    assert len({note[1:3] for note in cuda.notes}) == 2
    assert cuda.made == 2


def test_a_mark_is_one_event(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """The mark of a persistent gradient is created once and recorded in each step."""
    buffer = adapter.buffer(cuda.on(0, torch.zeros(3)), elementwise=True)
    mark = adapter.streams.mark(buffer.device)
    orders = []
    for _ in range(3):
        mark.set(buffer)
        orders.append(buffer.order)
    assert orders == sorted(set(orders))
    assert cuda.made == 2
    assert [note[1] for note in cuda.notes[1:]] == [buffer.event] * 3


def test_a_look_alike_on_a_device_is_described_anew(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """A device tensor is always described again, because its address does not tell when its values are ready."""
    tensor = cuda.on(0, torch.zeros(3))
    assert adapter.address(tensor, adapter.buffer(tensor, elementwise=True)) is None


class OnGpu:
    """A tensor that reports to be on a GPU."""

    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda = cuda
        self.index = index

    def get_device(self) -> int:
        return self.index

    def record_stream(self, stream: Any) -> None:
        self.cuda.notes.append(("used", id(self), stream.index, stream.cuda_stream))


def test_after(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """The current stream of the tensors' device waits, then the allocator is told that the tensors are used there."""
    one, other = OnGpu(cuda, 1), OnGpu(cuda, 1)
    adapter.after(0xAB, [one, other])
    assert cuda.notes == [
        ("retain", 1),
        ("wait", 0xAB, 1, 0x70),
        ("used", id(one), 1, 0x70),
        ("used", id(other), 1, 0x70),
    ]
    adapter.after(0xAC, [OnGpu(cuda, 0)])
    assert cuda.notes[4:6] == [("retain", 0), ("wait", 0xAC, 0, 0)]  # the default stream, in the context of its device
    assert cuda._contexts == []


def test_after_without_tensors(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """Without tensors, the current streams of all devices seen so far wait."""
    adapter.buffer(cuda.on(0, torch.zeros(3)), elementwise=True)
    adapter.buffer(cuda.on(1, torch.zeros(3)), elementwise=True)
    cuda.notes.clear()
    adapter.after(0xAB, [])
    assert [note for note in cuda.notes if note[0] == "wait"] == [("wait", 0xAB, 0, 0), ("wait", 0xAB, 1, 0x70)]


def test_a_wait_that_cuda_refuses(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """A failed wait raises one error with CUDA's own words and restores the thread's context."""
    cuda.failing = 400
    with pytest.raises(DeviceError, match="CUDA error 400: invalid resource handle"):
        adapter.after(0xAB, [OnGpu(cuda, 0)])
    assert cuda._contexts == []


def test_memory_that_torch_does_not_manage(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """An allocator that refuses ``record_stream``, as for a result of ddl's own, does not prevent the wait."""

    class Foreign(OnGpu):
        def record_stream(self, stream: Any) -> None:
            raise RuntimeError("ptr not found in ptr_info")

    adapter.after(0xAB, [Foreign(cuda, 1), own := OnGpu(cuda, 1)])
    assert [note for note in cuda.notes if note[0] != "retain"] == [("wait", 0xAB, 1, 0x70), ("used", id(own), 1, 0x70)]


def test_a_capture_is_refused(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """During graph capture nothing is recorded and nothing waits.

    A graph that contained ddl's own stream would be broken, and its runs would give wrong values.
    """
    tensor = cuda.on(0, torch.zeros(3))
    buffer = adapter.buffer(tensor, elementwise=True)
    cuda.notes.clear()
    cuda.capturing = True
    with pytest.raises(ValueError, match=r"cannot be captured in a CUDA graph.*make_graphed_callables"):
        adapter.buffer(tensor, elementwise=True)
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        adapter.streams.mark(buffer.device).set(buffer)
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        adapter.after(0xAB, [OnGpu(cuda, 0)])
    assert cuda.notes == []


def test_a_group_is_on_one_device(cuda: FakeCuda, adapter: TorchAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouped call over two devices raises an error that names them, before anything is sent."""
    monkeypatch.setattr(OPERATIONS, "adapter", adapter)
    tensors = [cuda.on(0, torch.zeros(2)), cuda.on(1, torch.zeros(2))]
    with World(1) as world, pytest.raises(ValueError, match="tensors lie on cuda:0 and cuda:1; make one call"):
        world.run(lambda rank, job: ddl.grouped_allreduce(tensors))


def test_groups_of_parameters_on_two_devices(cuda: FakeCuda, adapter: TorchAdapter) -> None:
    """A number of groups is divided by device, and a user's list that mixes devices is refused."""
    here, there = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))

    def form(groups: Any) -> list[list[str]]:
        def play(rank: int, job: Any) -> list[list[str]]:
            optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([here, there], lr=0.1), groups=groups)
            return [[slot.name for slot in group.slots] for group in optimizer._ddl.parameters.groups]

        with World(2) as world:
            return world.run(play)[0]

    assert form(1) == [["gradient.noname.0.0"], ["gradient.noname.0.1"]]
    with pytest.raises(ValueError, match="group 0 has parameters on cpu and meta; give those of each device a group"):
        form([[here, there]])
