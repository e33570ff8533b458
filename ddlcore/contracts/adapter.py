"""The adapter contract: how ddl gets the memory of a framework's tensors, and how it makes tensors from memory.

The collectives (allreduce, allgather, …) are written once, on top of this contract. A framework's package adds only
the parts that are specific to that framework: gradient hooks, optimizer wrappers, autograd functions.
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

    Any thread that submits operations or waits for operations may call the methods.
    """

    name: str = ""

    @abstractmethod
    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        """Return a Buffer that describes the memory of ``tensor`` itself, without a copy.

        ``elementwise``: if True, accept any dense layout (channels-last, for example); the Buffer then contains the
        tensor's strides. If False, accept only row-major memory. Raises ValueError in three cases: the layout is not
        accepted, ddl does not support the element type, or no transport can access the memory. The message contains
        advice, such as ``.contiguous()`` for the layout.

        Complex numbers and some other types travel as elements of another type; see ``carrier_of`` and
        ``Buffer.element``. An adapter that describes such tensors must also have the method ``restore``.
        """

    def require_writable(self, tensor: Any) -> None:
        """Raise ValueError, with advice, if ``tensor`` must not be written to.

        This is called after ``buffer`` for each tensor that an operation writes to. The default implementation does
        nothing. The default is right if all tensors of the framework are writable, or if the framework does not say
        whether a tensor is writable.
        """

    def address(self, tensor: Any, like: Buffer) -> int | None:
        """Return the address of ``tensor`` if the tensor is writable and differs from ``like`` only in the address.

        This is the case if ``buffer(tensor)`` would return a Buffer with the same shape, type, strides and device as
        ``like``, and if the values of the tensor are complete. Return None in any other case. A training loop calls
        this for each tensor in each step, so a faster override is useful.
        """
        buffer = self.buffer(tensor, elementwise=True)
        same = (buffer.shape, buffer.label, buffer.strides, buffer.device) == (
            like.shape,
            like.label,
            like.strides,
            like.device,
        )
        return buffer.address if same and buffer.wait is None and not buffer.event else None

    def range(self, name: str) -> AbstractContextManager[object] | None:
        """Return a context manager that shows a range called ``name`` in the framework's own profiler.

        A range is a named period of time on a thread; here it is the time inside the context manager, on the thread
        that enters it. Return None if the profiler does not run, or if the framework has no profiler. This is called
        once for each bucket, by any thread, and only if the setting ``profiler_ranges`` is on.
        """
        return None

    @abstractmethod
    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        """Return a new tensor with the element type and the device of ``like``.

        ``shape``: the shape of the new tensor. None: the new tensor has the shape and the memory layout of ``like``.
        """

    @abstractmethod
    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """Return a tensor that contains the row-major elements in ``memory``, on the same device as ``like``.

        If the framework can use foreign memory, the tensor uses ``memory`` itself. If it cannot, the elements are
        copied.
        """

    def restore(self, tensor: Any, like: Any) -> Any:
        """Return ``tensor`` as a tensor of the element type of ``like``, which is one that another type carries.

        ``tensor`` has the carrier's element type and the shape that the Buffer of such a tensor has. The values are the
        same memory, if the framework can do that. The default implementation is for frameworks without such types.
        """
        raise NotImplementedError(f"adapter {self.name} has no types that others carry")

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Copy the values of the tensor ``source`` to the tensor ``target``, like ``target[...] = source``."""

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        """Make later work of the calling thread on ``tensors`` run after the device event with the handle ``event``.

        The thread's current device stream waits for the event; the host does not wait. The event may be destroyed after
        this method has returned. Only adapters for tensors on devices need this method. ``wait`` of a handle calls this
        method once for each event. ``tensors`` are the tensors of the handle. For a persistent request ``tensors`` is
        empty, because the caller knows the tensor.
        """
        raise NotImplementedError(f"adapter {self.name} serves host memory only")
