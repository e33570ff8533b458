"""Tests of CudaDevice over a fake driver: queues, events, memory and tables of buckets."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ddl_nccl.cuda.compile import NoCompiler
from ddl_nccl.cuda.driver import failure
from ddl_nccl.cuda.names import Name
from ddl_nccl.cuda.queue import CudaQueue
from ddl_nccl.cuda.runtime import CudaDevice

from ddlcore.errors import DeviceError
from ddlcore.types import Device, DType, Sum
from plugins.ddl_nccl.tests.cuda.fake import FakeDriver, fake_code, settled
from plugins.ddl_nccl.tests.cuda.oracle import Array

COUNTS = (5, 0, 40, 3)
Opened = Callable[..., tuple[CudaDevice, FakeDriver, CudaQueue]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    made: list[tuple[CudaDevice, FakeDriver]] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # numba's simulator polls

    def build(obtain: Any = fake_code, refused: int = 0) -> tuple[CudaDevice, FakeDriver, CudaQueue]:
        driver = FakeDriver()
        if refused:
            driver.fail["load"] = refused
        device = CudaDevice(driver, obtain)
        device.open(Device("cuda", 1))
        made.append((device, driver))
        return device, driver, device.queue()

    yield build
    sys.setswitchinterval(interval)
    for device, driver in made:
        device.close()
        driver.stop()


def tensors(seed: int, dtype: Any = np.float32) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.normal(0, 1, n).astype(dtype) for n in COUNTS]


def addresses(arrays: list[Array]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def finish(queue: CudaQueue) -> None:
    assert queue.record().wait(40.0)


def test_packs_and_unpacks_in_order(opened: Opened) -> None:
    _, _, queue = opened()
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float16)
    back = [np.zeros(n, np.float32) for n in COUNTS]
    queue.packer(COUNTS, DType.F32, DType.F16, 0.5)(addresses(near), flat.ctypes.data)
    queue.unpacker(COUNTS, DType.F32, DType.F16, 2.0)(flat.ctypes.data, addresses(back))
    finish(queue)
    expected = (np.concatenate(near) * np.float32(0.5)).astype(np.float16)
    np.testing.assert_array_equal(flat, expected)
    np.testing.assert_array_equal(np.concatenate(back), expected.astype(np.float32) * 2)


@pytest.mark.parametrize("places", [64, 2])
def test_tables_under_way_are_not_written_over(opened: Opened, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When several buckets are queued before the first has run, each uses its own addresses."""
    monkeypatch.setattr("ddl_nccl.cuda.queue.PLACES", places)
    _, driver, queue = opened()
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    buckets = [tensors(seed) for seed in range(7)]
    flats = [np.zeros(sum(COUNTS), np.float32) for _ in buckets]
    with driver.held():
        for bucket, flat in zip(buckets[:places], flats):
            pack(addresses(bucket), flat.ctypes.data)
    for bucket, flat in zip(buckets[places:], flats[places:]):  # with few places, these buckets wait for a free one
        pack(addresses(bucket), flat.ctypes.data)
    finish(queue)
    for bucket, flat in zip(buckets, flats):
        np.testing.assert_array_equal(flat, np.concatenate(bucket))


def test_as_many_tables_as_are_needed_and_no_more(opened: Opened) -> None:
    _, driver, queue = opened()
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    flat = np.zeros(sum(COUNTS), np.float32)
    driver.asked.clear()
    for seed in range(5):
        near = tensors(seed)
        pack(addresses(near), flat.ctypes.data)
        finish(queue)
    assert driver.asked.get("pin", 0) <= 1


def test_a_list_that_is_reused_is_read_anew(opened: Opened) -> None:
    _, _, queue = opened()
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    first, second = tensors(1), tensors(2)
    table = addresses(first)
    flats = [np.zeros(sum(COUNTS), np.float32) for _ in range(2)]
    pack(table, flats[0].ctypes.data)
    table[:] = addresses(second)
    pack(table, flats[1].ctypes.data)
    finish(queue)
    np.testing.assert_array_equal(flats[1], np.concatenate(second))


def test_the_same_addresses_are_not_sent_again(opened: Opened) -> None:
    """In replay, a bucket whose tensors have not moved costs only one launch."""
    _, driver, queue = opened()
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float32)
    pack(addresses(near), flat.ctypes.data)
    finish(queue)
    driver.asked.clear()
    near[2][:] = 7
    other = np.zeros(sum(COUNTS), np.float32)
    pack(addresses(near), other.ctypes.data)
    assert driver.asked == {"launch": 1}
    finish(queue)
    np.testing.assert_array_equal(other, np.concatenate(near))


def test_reduces_and_fills(opened: Opened) -> None:
    _, _, queue = opened()
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    out = np.zeros(100, np.float32)
    queue.kernels.fill_identity(y.ctypes.data, 50, DType.F32, Sum)
    queue.kernels.reduce([x.ctypes.data, y.ctypes.data], out.ctypes.data, 100, DType.F32, Sum, 0.5, 2.0)
    finish(queue)
    np.testing.assert_array_equal(out, x + (np.arange(100) >= 50))


def test_queues_wait_for_each_other(opened: Opened) -> None:
    """As soon as a wait is queued, the event may be freed and its handle recorded again."""
    device, driver, first = opened()
    second = device.queue()
    source, middle, target = (np.full(10, value, np.uint8) for value in (1, 2, 3))
    with driver.held():
        first.copy(source.ctypes.data, middle.ctypes.data, 10)
        event = first.record()
        second.wait_for(event.handle)
        handle = event.handle
        del event
        again = first.record()
        assert again.handle == handle
        second.copy(middle.ctypes.data, target.ctypes.data, 10)
        assert not again.done() and not again.wait(0.01)
    finish(second)
    assert target.tolist() == [1] * 10


def test_waiting_does_not_burn_the_core(opened: Opened) -> None:
    _, driver, queue = opened()
    event = queue.record()
    with driver.held():
        blocked = queue.record()
        start, spent = time.monotonic(), time.thread_time()
        assert not blocked.wait(0.25)
        assert 0.25 <= time.monotonic() - start < 20.0
        assert time.thread_time() - spent < 0.1
    assert blocked.wait(20.0) and event.done()


def test_memory_is_freed_when_the_device_is_done_with_it(opened: Opened) -> None:
    device, driver, queue = opened()
    target = np.zeros(100, np.uint8)
    memory = device.allocate(100)
    assert memory.address % 512 == 0 and memory.nbytes == 100
    with driver.held():
        queue.kernels.fill_identity(memory.address, 100, DType.BOOL, Sum)
        queue.copy(memory.address, target.ctypes.data, 100)
        blocks = len(driver.blocks)
        del memory
        gc.collect()
    finish(queue)
    assert target.tolist() == [0] * 100
    deadline = time.monotonic() + 5.0
    while len(driver.blocks) == blocks and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(driver.blocks) == blocks - 1


def test_memory_is_not_freed_while_a_stream_of_the_users_reads_it(opened: Opened) -> None:
    """Memory is not freed while a stream that ddl does not know still reads it, and the host does not wait either.

    A framework's tensor may be freed as soon as the work that reads it is queued.
    """
    device, driver, queue = opened()
    users = driver.create_stream()
    target = np.zeros(100, np.uint8)
    memory = device.allocate(100)
    queue.kernels.fill_identity(memory.address, 100, DType.BOOL, Sum)
    finish(queue)
    with driver.held(users):
        driver.copy(target.ctypes.data, memory.address, 100, users)
        blocks = len(driver.blocks)
        start = time.monotonic()
        del memory
        gc.collect()
        assert time.monotonic() - start < 20.0  # the host does not wait for it either
        finish(queue)
        assert not device._freeing.settle(0.1) and len(driver.blocks) == blocks
    assert device._freeing.settle(10.0) and device.record(device._getting).wait(40.0)
    assert target.tolist() == [0] * 100 and len(driver.blocks) == blocks - 1


def test_memory_that_cannot_be_freed_now_is_freed_later(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be freed during a capture of a CUDA graph is freed together with later memory."""
    device, driver, _ = opened()
    record_all, refused = driver.record_all, [failure("recording", 900)]

    def recording(event: int, stream: int) -> None:
        if refused:
            raise refused.pop()
        record_all(event, stream)

    monkeypatch.setattr(driver, "record_all", recording)
    blocks = len(driver.blocks)
    for _ in range(2):
        device.allocate(100)  # nobody keeps it
        assert device._freeing.settle(10.0)
    deadline = time.monotonic() + 10.0
    while len(driver.blocks) > blocks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not refused and len(driver.blocks) == blocks


def test_memory_that_outlives_its_device_is_freed_by_waiting(opened: Opened) -> None:
    """After shutdown, memory that a user's tensor still held is freed after waiting for the whole device."""
    device, driver, queue = opened()
    memory = device.allocate(100)
    queue.close(5.0)
    device.close()
    del memory
    assert settled(lambda: driver.asked["synchronise"] == 1 and not driver.blocks)


def test_where_memory_is_short_what_was_let_go_is_waited_for(opened: Opened) -> None:
    device, driver, _ = opened()
    first = device.allocate(100)
    blocks = len(driver.blocks)
    del first
    gc.collect()
    driver.fail["allocate"] = 2
    again = device.allocate(100)
    assert device.record(device._getting).wait(40.0)
    assert again.nbytes == 100 and len(driver.blocks) == blocks


def test_pinned_memory_is_used_again_when_the_device_is_done_with_it(opened: Opened) -> None:
    device, driver, queue = opened()
    target = np.zeros(100, np.uint8)
    memory = device.pinned(100)
    first = memory.address
    with driver.held():
        queue.copy(memory.address, target.ctypes.data, 100)
        del memory
        gc.collect()
        kept = device.pinned(100)
        assert kept.address != first
    finish(queue)
    deadline = time.monotonic() + 5.0
    addresses, several = {kept.address}, []
    while first not in addresses and time.monotonic() < deadline:
        several.append(device.pinned(100))
        addresses.add(several[-1].address)
    assert first in addresses


def test_pinned_memory_of_ever_other_sizes_does_not_add_up(opened: Opened) -> None:
    """Pinned memory of ever different sizes, as allgather needs, is reused, so that it does not grow."""
    device, driver, _ = opened()
    sizes = np.random.default_rng(0).permutation(np.arange(100_000, 150_000, 250))
    for nbytes in map(int, sizes):
        assert device.pinned(nbytes).nbytes == nbytes
        assert device.record(device._retiring).wait(40.0)
    assert len(driver.pinned_blocks) < 16  # instead of 200, one for each size


def test_an_event_stays_out_of_the_pool_until_the_wait_for_it_is_queued(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event leaves the pool until a wait for it is queued, because another thread would record it again."""
    device, driver, _ = opened()
    wait_for, pooled = driver.wait_for, list[bool]()

    def watched(stream: int, event: int) -> None:
        pooled.append(event in device._events)
        wait_for(stream, event)

    monkeypatch.setattr(driver, "wait_for", watched)
    device.queue().close(1.0)
    device.allocate(100)  # nobody keeps it
    device.pinned(100)
    assert pooled and not any(pooled)


def test_memory_is_let_go_while_other_is_looked_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may free pinned memory while the same thread looks for free pinned memory."""
    device, driver, _ = opened()
    done, garbage = driver.done, [device.pinned(7)]

    def collecting(event: int) -> bool:
        garbage.clear()
        return done(event)

    with driver.held():
        device.pinned(5000)  # let go, but still in use
        monkeypatch.setattr(driver, "done", collecting)
        assert device.pinned(5000).nbytes == 5000
    assert not garbage


def test_without_a_compiler_buckets_are_copied(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler, buckets use plain copies, and one warning gives the reason.

    Calls that need a kernel raise DeviceError with the same reason.
    """

    def nothing(name: Name, capability: tuple[int, int]) -> bytes:
        raise NoCompiler("libnvvm is missing; pip install 'ddl-nccl[cu13]'")

    with caplog.at_level(logging.WARNING, "ddl"):
        _, driver, queue = opened(nothing)
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float32)
    back = [np.zeros(n, np.float32) for n in COUNTS]
    with caplog.at_level(logging.WARNING, "ddl"):
        queue.packer(COUNTS, DType.F32, DType.F32, 1.0)(addresses(near), flat.ctypes.data)
        queue.unpacker(COUNTS, DType.F32, DType.F32, 1.0)(flat.ctypes.data, addresses(back))
    finish(queue)
    np.testing.assert_array_equal(np.concatenate(back), np.concatenate(near))
    assert driver.asked["copy_many"] == 2 and "launch" not in driver.asked
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "libnvvm is missing" in caplog.text and "ddl-nccl[cu13]" in caplog.text
    for wire, scale in ((DType.F16, 1.0), (DType.F32, 0.5)):
        with pytest.raises(DeviceError, match="libnvvm is missing"):
            queue.packer(COUNTS, DType.F32, wire, scale)
    with pytest.raises(DeviceError, match="libnvvm is missing"):
        queue.kernels.reduce([1], 1, 1, DType.F32, Sum)


def test_a_kernel_that_the_driver_refuses_is_a_missing_one(opened: Opened) -> None:
    _, driver, queue = opened(refused=222)
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float32)
    pack(addresses(near), flat.ctypes.data)
    finish(queue)
    np.testing.assert_array_equal(flat, np.concatenate(near))
    assert driver.asked["copy_many"] == 1


def test_a_closed_queue_takes_nothing(opened: Opened) -> None:
    _, _, queue = opened()
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float32)
    queue.close(5.0)
    queue.close(5.0)
    for call in (queue.record, lambda: queue.copy(1, 2, 3), lambda: pack(addresses(near), flat.ctypes.data)):
        with pytest.raises(DeviceError, match="closed"):
            call()


def test_closing_waits_no_longer_than_told(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """Closing a queue waits no longer than its timeout, and does not free memory that the stream may still use."""
    device, driver, queue = opened()
    memory = device.allocate(10)
    blocks = len(driver.blocks)
    with driver.held(), caplog.at_level(logging.WARNING, "ddl"):
        start = time.monotonic()
        queue.close(0.05)
        assert time.monotonic() - start < 20.0
        assert f"{device.device} has not finished" in caplog.text
        del memory
        gc.collect()
        assert len(driver.blocks) == blocks


def test_behind_a_stream_that_never_ends_nobody_waits(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a stream that never ends, neither closing the device nor freeing memory waits.

    The memory ends with the process.
    """
    device, driver, queue = opened()
    memory, late = device.allocate(10), device.pinned(10)
    with driver.held(queue.handle):
        pinned = [device.pinned(10) for _ in range(20)]
        del pinned
        gc.collect()
        queue.close(0.05)
        start = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(driver, "destroy_stream", lambda stream: None)  # CUDA's does not wait, the fake's does
            device.close()
        assert time.monotonic() - start < 20.0
        del memory, late
        gc.collect()
        assert driver.asked.get("synchronise") is None
        assert len(driver.pinned_blocks) == 21


def test_nothing_is_kept_when_the_device_is_closed(opened: Opened) -> None:
    device, driver, queue = opened()
    held, late = device.allocate(10), device.pinned(10)
    early = device.pinned(10)
    pack = queue.packer(COUNTS, DType.F32, DType.F32, 1.0)
    near, flat = tensors(1), np.zeros(sum(COUNTS), np.float32)
    pack(addresses(near), flat.ctypes.data)
    finish(queue)
    del pack, early
    gc.collect()
    queue.close(5.0)
    device.close()
    device.close()
    assert settled(lambda: len(driver.pinned_blocks) == 1 and len(driver.blocks) == 1)
    del held, late
    assert settled(lambda: not driver.pinned_blocks and not driver.blocks)
    assert not driver.streams


def test_a_device_of_another_kind(opened: Opened) -> None:
    with pytest.raises(DeviceError, match="cpu is no CUDA device"):
        CudaDevice(FakeDriver(), fake_code).open(Device("cpu"))
