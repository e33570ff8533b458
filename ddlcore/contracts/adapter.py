"""The adapter contract: a framework's tensors seen as memory, and memory made into its tensors.

The verbs (allreduce, allgather, …) are written once, over this; a framework's package adds only what
is its framework's own: gradient hooks, optimizer wrappers, autograd functions.
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
    """Stateless; any thread that the user submits from or waits in may call it."""

    name: str = ""

    @abstractmethod
    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        """The memory of ``tensor`` itself, without a copy.

        ``elementwise`` accepts any dense layout (channels-last, say) and notes its strides; otherwise
        only row-major memory will do. Raises ValueError, saying what to do, for a tensor that is not
        dense (``.contiguous()``), has a type ddl does not carry, or lies where no transport reaches.
        """

    def require_writable(self, tensor: Any) -> None:
        """Raise ValueError, saying what to do, for a tensor that must not be written.

        Asked of each tensor that an operation writes to, after ``buffer``. A framework whose tensors are always
        writable, or do not tell, leaves this as it is.
        """

    def address(self, tensor: Any, like: Buffer) -> int | None:
        """Where ``tensor`` lies, if ``buffer`` would describe it as ``like`` but for its place and it is writable; else None.

        It is asked once for each call of a loop: a faster one is worth writing.
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
        """A stretch of time called ``name`` in the framework's own profiler, on the thread that enters it.

        None while no profiler runs, or where there is none. Only with the setting profiler_ranges it is asked
        for, once a bucket; any thread.
        """
        return None

    @abstractmethod
    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        """A new tensor of ``like``'s type and device; ``shape`` None: also of its shape and layout."""

    @abstractmethod
    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """The tensor whose elements stand in ``memory`` (row-major): without a copy where the framework can."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """target[...] = source."""

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        """What the calling thread does with ``tensors`` from now on comes after a device's event of that handle.

        On its current stream, without a wait of the host; the event may be gone when this has returned. Only
        for adapters whose buffers lie on devices. It is called by ``wait``, once a handle and event; the
        tensors are those of the handle, none of a persistent request, whose tensor the caller knows.
        """
        raise NotImplementedError(f"adapter {self.name} serves host memory only")
