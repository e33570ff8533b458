"""The pretend device keeps the contract's promises, and shows it where somebody relies on more than these."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ddl_conform.pretend import GARBAGE, KIND, PretendRuntime
from ddl_conform.pretend_tensors import PretendAdapter, PretendTensor, current_stream, stream

from ddlcore.contracts.transport import view
from ddlcore.errors import DeviceError
from ddlcore.types import Device, DType


@pytest.fixture
def runtime() -> Iterator[PretendRuntime]:
    one = PretendRuntime()
    one.open(Device(KIND, 0))
    yield one
    one.close()


def test_a_queue_runs_its_calls_in_order_and_later(runtime: PretendRuntime) -> None:
    """A held queue runs nothing; let go, everything, one after the other."""
    queue = runtime.queue()
    ran: list[int] = []
    with queue.held():
        for i in range(50):
            queue.call(lambda i=i: ran.append(i))  # type: ignore[misc]  # a default binds i
        event = queue.record()
        assert not event.done() and not event.wait(0.01) and ran == []
    assert event.wait(20.0) and ran == list(range(50))
    queue.close(5.0)


def test_a_missing_fence_is_a_wrong_value(runtime: PretendRuntime) -> None:
    """What another queue has not written yet is garbage to who reads without waiting for its event."""
    writer, reader = runtime.queue(), runtime.queue()
    source, seen = runtime.pinned(8), runtime.pinned(8)
    target = runtime.allocate(8)
    view(source.address, 8)[:] = b"12345678"
    with writer.held():
        writer.copy(source.address, target.address, 8)
        event = writer.record()
        reader.copy(target.address, seen.address, 8)
        assert reader.record().wait(20.0)
        assert bytes(view(seen.address, 8)) == bytes([GARBAGE]) * 8
        reader.wait_for(event.handle)
        reader.copy(target.address, seen.address, 8)
        behind = reader.record()
        assert not behind.wait(0.02)
    assert behind.wait(20.0)
    assert bytes(view(seen.address, 8)) == b"12345678"
    writer.close(5.0)
    reader.close(5.0)


def test_memory_that_was_let_go_is_noticed(runtime: PretendRuntime) -> None:
    """A queued call whose memory nobody keeps fails, and so does every event behind it."""
    queue = runtime.queue()
    source, target = runtime.allocate(64), runtime.allocate(64)
    before = queue.record()
    with queue.held():
        queue.kernels.pack([source.address], [16], DType.F32, target.address, DType.F32)
        del source
    behind = queue.record()
    with pytest.raises(DeviceError, match="nobody has kept"):
        behind.wait(20.0)
    assert before.done()
    queue.close(5.0)


def test_an_unknown_event_and_a_closed_queue_are_errors(runtime: PretendRuntime) -> None:
    """An event is gone with its last reference; after the end a queue takes nothing."""
    queue = runtime.queue()
    handle = queue.record().handle
    assert queue.record().wait(20.0)  # the first is nobody's now
    with pytest.raises(DeviceError, match="let it go"):
        queue.wait_for(handle)
    queue.close(5.0)
    with pytest.raises(DeviceError, match="closed"):
        queue.call(lambda: None)
    with pytest.raises(DeviceError, match="closed"):
        queue.record().done()


def test_close_gives_up_what_never_comes(runtime: PretendRuntime) -> None:
    """A queue that waits for a queue that does not move ends all the same; its events say that they failed."""
    stuck, queue = runtime.queue(), runtime.queue()
    with stuck.held():
        event = stuck.record()
        queue.wait_for(event.handle)
        behind = queue.record()
        queue.close(0.1)
        with pytest.raises(DeviceError):
            behind.wait(1.0)
    stuck.close(5.0)


def test_tensors_work_on_their_stream(runtime: PretendRuntime) -> None:
    """A tensor's changes happen in order on the current stream; a buffer tells the event behind them."""
    adapter = PretendAdapter()
    with stream(runtime) as mine:
        assert current_stream() is mine
        tensor = PretendTensor.of(np.arange(6, dtype=np.float32).reshape(2, 3))
        tensor.change(lambda array: np.multiply(array, 2, out=array))
        buffer = adapter.buffer(tensor, elementwise=True)
        assert (buffer.shape, buffer.dtype, buffer.device) == ((2, 3), DType.F32, Device(KIND, 0))
        later = adapter.buffer(tensor, elementwise=True)
        assert buffer.stream == mine.handle and 0 < buffer.order < later.order
        assert (tensor.numpy() == [[0, 2, 4], [6, 8, 10]]).all()
    with pytest.raises(RuntimeError, match="no current stream"):
        current_stream()
