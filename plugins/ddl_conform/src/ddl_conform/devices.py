"""The conformance suite of device runtimes.

To test a device runtime, write a subclass that sets ``runtime`` and ``device``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.standard import StandardSuite
from ddlcore.contracts.device import DeviceRuntime, Event, Queue
from ddlcore.contracts.transport import Memory, view
from ddlcore.errors import DeviceError
from ddlcore.types import Device, DType, ReduceOp

__all__ = ["DeviceSuite"]

COUNTS = (3, 1, 0, 17, 130)  # elements of a bucket's tensors: no tensor ends where the next one would be aligned
DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
NUMBERS = pytest.mark.parametrize(
    "dtype", [one for one in DType if one is not DType.BOOL], ids=lambda dtype: dtype.label
)
OPS = pytest.mark.parametrize(
    "op", [ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product], ids=lambda op: op.name
)
Cast = tuple[DType, DType]


class DeviceSuite(StandardSuite):
    """The tests that every device runtime must pass.

    A subclass sets ``runtime``, the class to test, and ``device``, the device on which the tests run. If this machine
    does not have the device, all tests are skipped; ``absent`` returns the reason.
    """

    runtime: ClassVar[type[DeviceRuntime]]
    device: ClassVar[Device]
    casts: ClassVar[frozenset[Cast]] = frozenset(
        (wide, half) for wide in (DType.F32, DType.F64) for half in (DType.F16, DType.BF16)
    )
    patience_s: ClassVar[float] = 60.0  # how long to wait for what one test has queued

    def absent(self) -> str:
        """Return the reason why the tests cannot run on this machine; "" if the machine has the device."""
        return "" if type(self).runtime.count() > self.device.index else f"there is no device {self.device} here"

    # --- used by the standard tests

    @contextmanager
    def queue(self) -> Iterator[Queue]:
        """Return a context manager that opens the device, and yields a new queue of this device.

        At the end of the context, the queue and the device are closed. If this machine does not have the device, the
        test is skipped.
        """
        if self.absent():
            pytest.skip(self.absent())
        runtime = type(self).runtime()
        runtime.open(self.device)
        queue = runtime.queue()
        try:
            yield queue
        finally:
            queue.close(self.patience_s)
            runtime.close()

    def reach(self, queue: Queue) -> None:
        """Wait until all calls that were enqueued on ``queue`` have run.

        Raises AssertionError after ``patience_s`` seconds.
        """
        assert queue.record().wait(self.patience_s), f"not done after {self.patience_s:g} s"

    def put(self, queue: Queue, array: oracle.Array, offset: int = 0) -> Memory:
        """Copy ``array`` into new device memory, and return this memory.

        The copy begins ``offset`` bytes after the beginning of the memory.
        """
        memory, pinned = queue.runtime.allocate(array.nbytes + offset + 16), queue.runtime.pinned(array.nbytes + 1)
        view(pinned.address, array.nbytes)[:] = array.tobytes()
        queue.copy(pinned.address, memory.address + offset, array.nbytes)
        self.reach(queue)
        return memory

    def get(self, queue: Queue, address: int, dtype: DType, count: int) -> oracle.Array:
        """Wait until all calls that were enqueued so far have run, and return a copy of an array in device memory.

        The array has ``count`` elements of the type ``dtype`` and begins at ``address``.
        """
        pinned = queue.runtime.pinned(count * dtype.itemsize + 1)
        queue.copy(address, pinned.address, count * dtype.itemsize)
        self.reach(queue)
        return np.frombuffer(bytes(view(pinned.address, count * dtype.itemsize)), oracle.numpy_dtype(dtype)).copy()

    def bucket(self, queue: Queue, dtype: DType, seed: int = 0) -> tuple[list[oracle.Array], list[Memory], list[int]]:
        """Make the tensors of a bucket, and copy each tensor into device memory of its own.

        Return (the values of each tensor, the memory of each tensor, the address of each tensor). Tensor i has
        COUNTS[i] elements. The addresses of the tensors have different alignments, as far as their type allows that.
        """
        arrays = [oracle.values(dtype, count, i, seed=seed) for i, count in enumerate(COUNTS)]
        offsets = [i * dtype.itemsize % 16 for i in range(len(COUNTS))]
        held = [self.put(queue, array, offset) for array, offset in zip(arrays, offsets)]
        return arrays, held, [memory.address + offset for memory, offset in zip(held, offsets)]

    # --- the device

    def test_what_there_is_is_counted(self) -> None:
        """The suite's device can be opened.

        The device with the index ``count()`` does not exist: to open it raises DeviceError with a message of one line.
        """
        with self.queue() as queue:
            assert queue.runtime.device == self.device
            assert queue.runtime.identity
        runtime = type(self).runtime()
        with pytest.raises(DeviceError) as caught:
            runtime.open(Device(self.device.kind, type(self).runtime.count()))
        assert "\n" not in str(caught.value)

    def test_one_device_has_one_identity(self) -> None:
        """If two runtimes open the same device, both report the same ``identity``."""
        with self.queue() as one, self.queue() as other:
            assert one.runtime.identity == other.runtime.identity

    def test_memory_is_aligned(self) -> None:
        """``allocate`` returns memory whose address is a multiple of 512, for every size.

        No two pieces of memory overlap.
        """
        with self.queue() as queue:
            held = [queue.runtime.allocate(nbytes) for nbytes in (1, 100, 512, 4097)]
            assert all(memory.address % 512 == 0 for memory in held)
            spans = sorted((memory.address, memory.address + memory.nbytes) for memory in held)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))

    # --- queues and events

    def test_bytes_come_back(self) -> None:
        """``copy`` copies bytes from pinned host memory to the device, within the device, and back to the host.

        A copy of 0 bytes does nothing.
        """
        with self.queue() as queue:
            array = oracle.values(DType.U8, 100_001, 0)
            first = self.put(queue, array)
            second = queue.runtime.allocate(array.nbytes)
            queue.copy(first.address, second.address, array.nbytes)
            queue.copy(first.address, second.address, 0)
            assert not oracle.difference(self.get(queue, second.address, DType.U8, array.size), array)

    def test_a_queue_runs_in_order(self) -> None:
        """The copies of one queue run one after the other, in the order of their calls.

        Each of a hundred copies moves the bytes by one place. So the bytes are in the right place at the end only if no
        two copies ran at the same time.
        """
        with self.queue() as queue:
            array = oracle.values(DType.U8, 128, 0)
            held = [self.put(queue, array), queue.runtime.allocate(128)]
            for i in range(100):
                queue.copy(held[i % 2].address, held[(i + 1) % 2].address + 1, 127)
            assert not oracle.difference(self.get(queue, held[0].address + 100, DType.U8, 28), array[:28])

    def test_events_are_done_in_order(self) -> None:
        """When an event is done, all earlier events of the same queue are done.

        Each event has a handle of its own.
        """
        with self.queue() as queue:
            source, target = queue.runtime.allocate(1 << 20), queue.runtime.allocate(1 << 20)
            events: list[Event] = []
            for _ in range(20):
                queue.copy(source.address, target.address, 1 << 20)
                events.append(queue.record())
            assert len({event.handle for event in events}) == 20 and all(event.handle for event in events)
            while not events[-1].wait(self.patience_s / 10_000):
                done = [event.done() for event in reversed(events)]  # ask about the earliest event last
                assert done == sorted(done)
            assert all(event.wait(0.0) for event in events)

    def test_queues_wait_for_one_another(self) -> None:
        """A queue can wait for an event of another queue, while the host does not wait.

        Two queues copy the same data in turn. Each copy reads the result of the previous copy, which ran on the other
        queue.
        """
        with self.queue() as one, self.queue() as other:
            array = oracle.values(DType.F32, 50_000, 0)
            held = [self.put(one, array)] + [one.runtime.allocate(array.nbytes) for _ in range(20)]
            for i, (source, target) in enumerate(pairwise(held)):
                mine, theirs = (one, other) if i % 2 else (other, one)
                mine.copy(source.address, target.address, array.nbytes)
                theirs.wait_for(mine.record().handle)  # the event is freed immediately
            assert not oracle.difference(self.get(other, held[-1].address, DType.F32, array.size), array)

    def test_a_closed_queue_stays_closed(self) -> None:
        """``Queue.close`` waits until all enqueued calls have run. A second call of ``close`` does no harm."""
        with self.queue() as queue:
            array = oracle.values(DType.U8, 4096, 0)
            held, pinned = self.put(queue, array), queue.runtime.pinned(4096)
            queue.copy(held.address, pinned.address, 4096)
            queue.close(self.patience_s)
            assert bytes(view(pinned.address, 4096)) == array.tobytes()
            queue.close(self.patience_s)

    # --- kernels

    @DTYPES
    @pytest.mark.parametrize("again", [False, True], ids=["once", "arranged"])
    def test_tensors_are_packed_and_unpacked(self, dtype: DType, again: bool) -> None:
        """Tensors at any alignment are packed without gaps, and unpacked to tensors at any alignment.

        In the case ``once``, the queue's ``kernels`` are called. In the case ``arranged``, one packer and one unpacker
        are used twice, with new addresses each time.
        """
        with self.queue() as queue:
            pack = queue.packer(COUNTS, dtype, dtype, 1.0) if again else None
            unpack = queue.unpacker(COUNTS, dtype, dtype, 1.0) if again else None
            for seed in range(2):
                arrays, held, sources = self.bucket(queue, dtype, seed)
                whole = np.concatenate(arrays)
                fused = self.put(queue, np.zeros(whole.size, whole.dtype))
                if pack is None:
                    queue.kernels.pack(sources, list(COUNTS), dtype, fused.address, dtype)
                else:
                    pack(sources, fused.address)
                assert not oracle.difference(self.get(queue, fused.address, dtype, whole.size), whole)
                _, others, targets = self.bucket(queue, dtype, seed + 7)
                if unpack is None:
                    queue.kernels.unpack(fused.address, dtype, targets, list(COUNTS), dtype)
                else:
                    unpack(fused.address, targets)
                for array, address in zip(arrays, targets):
                    assert not oracle.difference(self.get(queue, address, dtype, array.size), array)
                assert held and others

    @NUMBERS
    def test_values_are_scaled_on_the_way(self, dtype: DType) -> None:
        """``pack`` multiplies the values by a factor: floats in their own type, but 16-bit floats in float32.

        Integers are multiplied in float64, and the products are truncated.
        """
        with self.queue() as queue:
            arrays, held, sources = self.bucket(queue, dtype)
            whole = np.concatenate(arrays)
            fused = queue.runtime.allocate(whole.nbytes)
            queue.kernels.pack(sources, list(COUNTS), dtype, fused.address, dtype, 0.5)
            found = self.get(queue, fused.address, dtype, whole.size)
            assert held and not oracle.difference(found, oracle.reduce([whole], ReduceOp.Sum, 0.5), exact=False)

    @pytest.mark.parametrize("wide", [DType.F32, DType.F64], ids=lambda dtype: dtype.label)
    @pytest.mark.parametrize("half", [DType.F16, DType.BF16], ids=lambda dtype: dtype.label)
    def test_values_are_cast_on_the_way(self, wide: DType, half: DType) -> None:
        """``pack`` and ``unpack`` convert floats as numpy does: they round to the nearest value, and ties to even."""
        if (wide, half) not in self.casts:
            pytest.skip(f"{wide.label} is not cast to {half.label} here")
        with self.queue() as queue:
            arrays, held, sources = self.bucket(queue, wide)
            expected = [array.astype(np.float32).astype(oracle.numpy_dtype(half)) for array in arrays]
            fused = queue.runtime.allocate(sum(COUNTS) * half.itemsize)
            queue.packer(COUNTS, wide, half, 1.0)(sources, fused.address)
            found = self.get(queue, fused.address, half, sum(COUNTS))
            assert not oracle.difference(found, np.concatenate(expected))
            _, others, targets = self.bucket(queue, wide, 7)
            queue.unpacker(COUNTS, wide, half, 1.0)(fused.address, targets)
            for array, address in zip(expected, targets):
                assert not oracle.difference(self.get(queue, address, wide, array.size), array.astype(wide.label))
            assert held and others

    @OPS
    @DTYPES
    def test_values_are_reduced(self, dtype: DType, op: ReduceOp) -> None:
        """``reduce`` combines the source arrays in their order, and may write the result into a source array.

        16-bit floats are combined in float32, and only the result is rounded to 16 bits.
        """
        with self.queue() as queue:
            arrays = [oracle.values(dtype, 1001, rank) for rank in range(3)]
            held = [self.put(queue, array) for array in arrays]
            places = [memory.address for memory in held]
            queue.kernels.reduce(places, places[0], 1001, dtype, op)
            assert not oracle.difference(
                self.get(queue, places[0], dtype, 1001), oracle.reduce(arrays, op), exact=False
            )

    @OPS
    @DTYPES
    def test_an_identity_changes_nothing(self, dtype: DType, op: ReduceOp) -> None:
        """``fill_identity`` writes the identity element of ``op`` into memory.

        A reduction of values with the identity element leaves the values unchanged.
        """
        with self.queue() as queue:
            array = oracle.values(dtype, 77, 0)
            memory, nothing = self.put(queue, array), queue.runtime.allocate(77 * dtype.itemsize)
            queue.kernels.fill_identity(nothing.address, 77, dtype, op)
            found = self.get(queue, nothing.address, dtype, 77)
            assert memory and not oracle.difference(oracle.reduce([array, found], op), array)

    def test_what_is_passed_is_read_at_once(self) -> None:
        """As soon as a call returns, the caller may change the lists of addresses and counts that it has passed."""
        with self.queue() as queue:
            arrays, held, sources = self.bucket(queue, DType.F32)
            counts = list(COUNTS)
            fused = queue.runtime.allocate(sum(COUNTS) * 4)
            pack = queue.packer(counts, DType.F32, DType.F32, 1.0)
            counts[:] = [0] * len(counts)
            pack(sources, fused.address)
            sources[:] = [0] * len(sources)
            found = self.get(queue, fused.address, DType.F32, sum(COUNTS))
            assert held and not oracle.difference(found, np.concatenate(arrays))
