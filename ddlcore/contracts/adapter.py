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
    """The access to the tensors of one framework. An adapter has no state.

    Its methods may be called by any thread in which the user submits operations or waits for them.
    """

    name: str = ""

    @abstractmethod
    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        """Return a Buffer that describes the memory of ``tensor`` itself, without a copy.

        ``elementwise``: if True, any dense layout (channels-last, for example) is accepted, and the Buffer contains its
        strides; if False, only row-major memory. Raises ValueError, with advice, if the layout is not accepted (the
        advice is ``.contiguous()``), if ddl does not support the element type, or if no transport can access the
        memory.
        """

    def require_writable(self, tensor: Any) -> None:
        """Raise ValueError, with advice, if ``tensor`` must not be written to.

        It is called after ``buffer`` for each tensor that an operation writes to. The default does nothing: it is right
        if the framework's tensors are always writable, or if the framework does not say whether they are.
        """

    def address(self, tensor: Any, like: Buffer) -> int | None:
        """Return the address of ``tensor`` if the tensor is writable and differs from ``like`` only in its address.

        Otherwise return None. "Differs only in its address" means that ``buffer`` would return the same description as
        ``like`` with another address. A training loop calls this for each tensor in each step, so a faster override is
        worth its while.
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
        """Return a context manager that shows a range called ``name`` in the framework's own profiler.

        The range belongs to the thread that enters it. Return None if no profiler runs, or if the framework has none.
        This is called only if the setting profiler_ranges is on, once for each bucket, by any thread.
        """
        return None

    @abstractmethod
    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        """Return a new tensor with the element type and device of ``like``.

        If ``shape`` is None, it also has the shape and layout of ``like``.
        """

    @abstractmethod
    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """Return a tensor of the row-major elements in ``memory``, on the same device as ``like``.

        The tensor uses the memory itself if the framework can do that; otherwise the elements are copied.
        """

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Copy the values of ``source`` to ``target``, as ``target[...] = source`` does."""

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        """Make later work of the calling thread on ``tensors`` run after the device event with the handle ``event``.

        The thread's current stream waits for the event; the host does not. The event may be destroyed after this method
        has returned. Only adapters whose buffers are on devices need this method. ``wait`` of a handle calls it once
        for each event. ``tensors`` are the tensors of the handle; the list is empty for a persistent request, whose
        tensor the caller knows.
        """
        raise NotImplementedError(f"adapter {self.name} serves host memory only")
