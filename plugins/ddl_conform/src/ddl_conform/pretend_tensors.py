"""Tensors of the pretend device (see pretend.py), and the adapter for these tensors.

A stream is a queue of the device. Each thread has a current stream. If a thread calls an operation on tensors, the
operation is queued on the current stream of this thread.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ddl_conform import oracle
from ddl_conform.pretend import PretendQueue, PretendRuntime
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.transport import Memory
from ddlcore.types import Buffer, DType

__all__ = ["PretendAdapter", "PretendTensor", "current_stream", "stream"]

Array = Any  # numpy.ndarray
_current = threading.local()
_orders = itertools.count(1)


def current_stream() -> PretendQueue:
    """Return the calling thread's current stream.

    Raises RuntimeError if the thread has none, that is outside the context manager ``stream``.
    """
    found: PretendQueue | None = getattr(_current, "stream", None)
    if found is None:
        raise RuntimeError("this thread has no current stream; use `with stream(runtime):`")
    return found


@contextmanager
def stream(runtime: PretendRuntime) -> Iterator[PretendQueue]:
    """Return a context manager that makes a new stream of ``runtime`` the calling thread's current stream.

    At the end of the context, the context manager waits until all calls on the new stream have run, at most 10 s. Then
    the previous stream is the current stream again.
    """
    before = getattr(_current, "stream", None)
    mine = _current.stream = runtime.queue()
    try:
        yield mine
    finally:
        _current.stream = before
        mine.close(10.0)


class PretendTensor:
    """A row-major tensor in the memory of a pretend device.

    ``of`` and ``change`` are queued on the current stream of the calling thread. ``numpy`` waits for this stream.
    """

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: DType, runtime: PretendRuntime) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.runtime = runtime

    @classmethod
    def of(cls, array: Array, runtime: PretendRuntime | None = None) -> PretendTensor:
        """Return a new tensor on the device of ``runtime``, with the values that ``array`` has now.

        If ``runtime`` is None, the tensor is on the device of the current stream.
        """
        runtime = runtime or current_stream().runtime
        dtype = DType.of(array.dtype.name)
        tensor = cls(runtime.allocate(max(array.nbytes, 1)), array.shape, dtype, runtime)
        values = np.ascontiguousarray(array).copy()
        tensor.change(lambda mine: np.copyto(mine, values.reshape(mine.shape)))
        return tensor

    @property
    def count(self) -> int:
        """Return the number of elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    def change(self, how: Callable[[Array], object]) -> None:
        """Queue a call of ``how(array)`` on the current stream.

        ``array`` is a numpy array over the tensor's own memory, so ``how`` may read and change the tensor's values.
        """
        current_stream().call(lambda: (how(self._array()), None)[1])

    def numpy(self) -> Array:
        """Wait until all calls on the current stream have run, and return a copy of the tensor's values.

        Raises TimeoutError after 30 s.
        """
        read: list[Array] = []
        self.change(lambda mine: read.append(mine.copy()))
        if not current_stream().record().wait(30.0):
            raise TimeoutError("pretend: the current stream did not come to its end in 30 s")
        return read[0]

    def _array(self) -> Array:
        nbytes = self.count * self.dtype.itemsize
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.memory.address))
        return raw.view(oracle.numpy_dtype(self.dtype)).reshape(self.shape)


class PretendAdapter(Adapter):
    """The adapter for pretend tensors.

    Each buffer has an event of the current stream. The tensor's values are complete when this event is done.
    """

    name = "pretend"

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if not isinstance(tensor, PretendTensor):
            raise ValueError(
                f"a pretend tensor is needed, not {type(tensor).__name__}; make one: PretendTensor.of(...)"
            )
        mine = current_stream()
        event = mine.record()
        return Buffer(
            tensor.memory.address,
            tensor.count,
            tensor.dtype,
            tensor.shape,
            device=tensor.runtime.device,
            owner=(tensor, event),
            event=event.handle,
            stream=mine.handle,
            order=next(_orders),
        )

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> PretendTensor:
        shape = like.shape if shape is None else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * like.dtype.itemsize
        return PretendTensor(like.runtime.allocate(max(nbytes, 1)), shape, like.dtype, like.runtime)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> PretendTensor:
        return PretendTensor(memory, tuple(shape), dtype, like.runtime)

    def copy(self, source: Any, target: Any) -> None:
        mine = current_stream()
        mine.copy(source.memory.address, target.memory.address, source.count * source.dtype.itemsize)
        held = (source, target)
        mine.call(lambda: held and None)

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        current_stream().wait_for(event)
