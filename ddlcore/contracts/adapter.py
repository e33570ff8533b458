"""The adapter contract: how ddl gets the memory of a framework's tensors, and how it makes tensors from memory.

The verbs (allreduce, allgather, …) are written once, on top of this contract. A framework's package adds only what is
specific to that framework: gradient hooks, optimizer wrappers, autograd functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ddlcore.contracts.transport import Memory
from ddlcore.types import Buffer, DType

__all__ = ["Adapter"]


class Adapter(ABC):
    """The access to one framework's tensors. An adapter has no state.

    Any thread in which the user submits operations or waits for them may call its methods.
    """

    name: str = ""

    @abstractmethod
    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        """Return a Buffer that describes the memory of ``tensor`` itself, without a copy.

        ``elementwise``: True accepts any dense layout (channels-last, for example) and notes its strides; False accepts
        only row-major memory. Raises ValueError, with advice, if the tensor is not dense (the advice is
        ``.contiguous()``), has an element type that ddl does not support, or lies in memory that no transport can
        access.
        """

    def require_writable(self, tensor: Any) -> None:
        """Raise ValueError, with advice, if ``tensor`` must not be written to.

        It is called after ``buffer`` for each tensor that an operation writes to. Do not override it if the framework's
        tensors are always writable, or if the framework does not say whether they are.
        """

    def address(self, tensor: Any, like: Buffer) -> int | None:
        """Return the address of ``tensor`` if it is writable and differs from ``like`` in its address only; else None.

        "Differs in its address only" means that ``buffer`` would return the same description as ``like`` with another
        address. The method is called once per call in a loop, so it is worth overriding with a faster implementation.
        """
        buffer = self.buffer(tensor, elementwise=True)
        same = (buffer.shape, buffer.dtype, buffer.strides, buffer.device) == (
            like.shape,
            like.dtype,
            like.strides,
            like.device,
        )
        return buffer.address if same and buffer.wait is None and not buffer.event else None

    def range(self, name: str) -> AbstractContextManager[object] | None:
        """Return a context manager that marks a range called ``name`` in the framework's own profiler.

        The range is on the thread that enters it. Return None if no profiler runs, or if the framework has none. It is
        called only if the setting profiler_ranges is on, once per bucket, from any thread.
        """
        return None

    @abstractmethod
    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        """Return a new tensor with the element type and device of ``like``.

        If ``shape`` is None, it also has the shape and layout of ``like``.
        """

    @abstractmethod
    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """Return a tensor over the row-major elements in ``memory``, without a copy if the framework can do that."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Copy the values: ``target[...] = source``."""

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        """Order the later work of the calling thread on ``tensors`` after the device event with the handle ``event``.

        The thread's current stream waits for the event; the host does not wait. The event may be destroyed after this
        method has returned. Only adapters whose buffers lie on devices need this method. ``wait`` calls it once per
        handle and event. ``tensors`` are the tensors of the handle; the list is empty for a persistent request, whose
        tensor the caller knows.
        """
        raise NotImplementedError(f"adapter {self.name} serves host memory only")
