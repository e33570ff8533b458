"""Tests that an adapter describes the memory of a tensor, and makes tensors from memory, without a copy."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.adapter_base import DTYPES, AdapterBase
from ddlcore.contracts.transport import Memory, view
from ddlcore.types import Buffer, DType

__all__ = ["AdapterMemory"]

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (2, 3, 4), (3, 0, 2), (1, 5, 1))


def _seen(buffer: Buffer) -> oracle.Array:
    """Return a numpy array over the memory that ``buffer`` describes, with the buffer's shape and strides.

    Nothing is copied.
    """
    flat = np.frombuffer(view(buffer.address, buffer.nbytes), oracle.numpy_dtype(buffer.dtype))
    if buffer.strides is None:
        return flat.reshape(buffer.shape)
    strides = [stride * buffer.dtype.itemsize for stride in buffer.strides]
    return np.lib.stride_tricks.as_strided(flat, buffer.shape, strides)


class AdapterMemory(AdapterBase):
    """The tests of those methods of an adapter that make buffers from tensors, and tensors from memory."""

    @DTYPES
    def test_a_tensor_is_described(self, dtype: DType) -> None:
        """``buffer`` returns the tensor's count, type, shape and address, and a row-major layout.

        The values of the tensor are in the memory at this address.
        """
        self.needs(dtype)
        for shape, elementwise in product(SHAPES, (True, False)):
            buffer = self.adapter.buffer(self.make(self.values(dtype, shape)), elementwise=elementwise)
            described = (buffer.count, buffer.dtype, tuple(buffer.shape), buffer.strides, buffer.device.kind)
            assert described == (int(np.prod(shape)), dtype, shape, None, "cpu"), f"described as {described}"
            assert buffer.owner is not None, "nothing keeps the memory alive"
            fault = oracle.difference(_seen(buffer), self.values(dtype, shape))
            assert not fault, f"the memory at the address of {dtype.label}{list(shape)}: {fault}"

    @DTYPES
    def test_no_copy_is_made(self, dtype: DType) -> None:
        """``buffer`` describes the tensor's own memory, not a copy.

        The test writes values to the memory of the buffer, and finds them in the tensor. A second call of ``buffer``
        returns the same address.
        """
        self.needs(dtype)
        tensor = self.make(self.values(dtype, (6, 7)))
        buffer = self.adapter.buffer(tensor, elementwise=True)
        if buffer.wait is not None:
            buffer.wait()
        _seen(buffer)[...] = self.values(dtype, (6, 7), seed=1)
        self.same(tensor, self.values(dtype, (6, 7), seed=1), "after writing through the buffer")
        assert self.adapter.buffer(tensor, elementwise=False).address == buffer.address, "the address changed"

    def test_a_tensor_like_the_last_tells_its_address(self) -> None:
        """``address(tensor, like)`` returns the tensor's address if only the address differs from that of ``like``.

        If the tensor differs from ``like`` in its shape, type or strides, ``address`` returns None.
        """
        dtypes = [dtype for dtype in DType if dtype in (DType.F32, DType.I64)]
        shapes = ((), (4,), (2, 2), (2, 3))
        tensors = [self.make(self.values(dtype, shape)) for dtype, shape in product(dtypes, shapes)]
        turned = self.permuted(self.make(self.values(DType.F32, (2, 3))))
        tensors += [self.make(self.values(DType.F32, (2, 3), 1)), *([] if turned is None else [turned])]
        for one, other in product(tensors, tensors):
            like, buffer = (self.adapter.buffer(tensor, elementwise=True) for tensor in (one, other))
            alike = (like.shape, like.dtype, like.strides) == (buffer.shape, buffer.dtype, buffer.strides)
            wanted = buffer.address if alike and buffer.wait is None else None
            assert self.adapter.address(other, like) == wanted, f"{buffer} asked for as {like}"

    def test_a_buffer_keeps_its_memory(self) -> None:
        """The owner of a buffer keeps the memory alive after the last other reference to the tensor is gone."""
        buffers = [
            self.adapter.buffer(self.make(self.values(DType.F64, (999,), i)), elementwise=True) for i in range(5)
        ]
        gc.collect()
        others = [self.make(np.full(999, -1.0)) for _ in range(10)]  # these would reuse memory that had been freed
        for i, buffer in enumerate(buffers):
            fault = oracle.difference(_seen(buffer), self.values(DType.F64, (999,), i))
            assert not fault, f"the memory of a tensor whose buffer is held: {fault}"
        del others

    @DTYPES
    def test_permuted_tensors_are_dense(self, dtype: DType) -> None:
        """``buffer`` accepts a transposed tensor if ``elementwise`` is true, and returns the right strides.

        If ``elementwise`` is false, ``buffer`` refuses such a tensor by a ValueError.
        """
        self.needs(dtype)
        tensor = self.permuted(self.make(self.values(dtype, (3, 4))))
        if tensor is None:
            pytest.skip("the framework's tensors are always row-major")
        buffer = self.adapter.buffer(tensor, elementwise=True)
        assert buffer.strides == (1, 4), f"strides {buffer.strides}, counted in elements, instead of (1, 4)"
        fault = oracle.difference(
            np.ascontiguousarray(_seen(buffer)), np.ascontiguousarray(self.values(dtype, (3, 4)).T)
        )
        assert not fault, f"the memory at the buffer's address: {fault}"
        with pytest.raises(ValueError, match="contiguous"):
            self.adapter.buffer(tensor, elementwise=False)

    @pytest.mark.parametrize("elementwise", [True, False])
    def test_tensors_with_gaps_are_refused(self, elementwise: bool) -> None:
        """``buffer`` refuses a tensor with gaps between its elements by a ValueError.

        The message tells the user to make the tensor contiguous.
        """
        tensor = self.sliced(self.make(self.values(DType.F32, (8,))))
        if tensor is None:
            pytest.skip("the framework's tensors have no gaps")
        with pytest.raises(ValueError, match="contiguous"):
            self.adapter.buffer(tensor, elementwise=elementwise)

    def test_foreign_types_are_refused(self) -> None:
        """``buffer`` refuses an unsupported element type by a ValueError that names the supported types."""
        with pytest.raises(ValueError, match=r"not supported.*float32"):
            self.adapter.buffer(self.unsupported(), elementwise=True)

    @DTYPES
    def test_allocate(self, dtype: DType) -> None:
        """``allocate(like)`` returns a new tensor with the type, the shape and the memory layout of ``like``.

        ``allocate(like, shape)`` returns a new row-major tensor with the type of ``like`` and the given shape.
        """
        self.needs(dtype)
        like = self.make(self.values(dtype, (3, 4)))
        for tensor in (like, self.permuted(like)):
            if tensor is None:
                continue
            old, new = (self.adapter.buffer(t, elementwise=True) for t in (tensor, self.adapter.allocate(tensor)))
            assert (new.shape, new.dtype, new.strides) == (old.shape, old.dtype, old.strides), (
                f"{new} is not like {old}"
            )
            assert abs(new.address - old.address) >= old.nbytes, "allocate gave memory that is in use"
        for shape in ((), (5,), (0, 3), (2, 2, 2)):
            made = self.adapter.buffer(self.adapter.allocate(like, shape), elementwise=False)
            assert (tuple(made.shape), made.dtype) == (shape, dtype), f"allocate({shape}) gave {made}"

    @DTYPES
    def test_adopt(self, dtype: DType) -> None:
        """``adopt`` returns a tensor with the values that are in the given memory.

        If the suite's attribute ``adopts`` is true, the tensor uses this memory, without a copy.
        """
        self.needs(dtype)
        like = self.make(self.values(dtype, (1,)))
        for shape in SHAPES:
            values = self.values(dtype, shape)
            memory = Memory(values.nbytes)
            view(memory.address, values.nbytes)[:] = values.tobytes()
            tensor = self.adapter.adopt(memory, shape, dtype, like)
            self.same(tensor, values, f"adopted {dtype.label}{list(shape)}")
            if self.adopts and values.nbytes:
                address = self.adapter.buffer(tensor, elementwise=True).address
                assert address == memory.address, f"adopt copied {dtype.label}{list(shape)}"

    def test_adopted_memory_lives_with_its_tensor(self) -> None:
        """The memory that was passed to ``adopt`` is freed when the tensor is freed, neither earlier nor later.

        If the memory were freed earlier, other code could write into the tensor. If the memory were freed later or
        never, a training run would fill the machine's memory.
        """
        memory = Memory(4 * 999)
        tensor = self.adapter.adopt(memory, (999,), DType.F32, self.make(self.values(DType.F32, (1,))))
        held = weakref.ref(memory)
        del memory
        gc.collect()
        if self.adopts:
            assert held() is not None, "nothing keeps adopted memory alive while its tensor is in use"
        del tensor
        gc.collect()
        assert held() is None, "adopted memory is kept although its tensor is gone"

    @DTYPES
    def test_copy(self, dtype: DType) -> None:
        """``copy(source, target)`` copies all values, also if the two tensors have different memory layouts."""
        self.needs(dtype)
        values = self.values(dtype, (4, 4), seed=1)
        source, target = self.make(values), self.make(self.values(dtype, (4, 4), seed=2))
        self.adapter.copy(source, target)
        self.same(target, values, "after copy")
        self.same(source, values, "the source after copy")
        turned = self.permuted(self.make(self.values(dtype, (4, 4), seed=3)))
        if turned is not None:
            self.adapter.copy(source, turned)
            self.same(turned, values, "after copy into a permuted tensor")
