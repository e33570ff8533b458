"""The adapter door: a framework's tensors seen as memory, and memory made into its tensors.

The verbs (allreduce, allgather, …) are written once, over this; a framework's package adds only what
is its framework's own: gradient hooks, optimizer wrappers, autograd functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def address(self, tensor: Any, like: Buffer) -> int | None:
        """Where ``tensor`` lies, if ``buffer`` would describe it as ``like`` but for its place; else None.

        It is asked once for each call of a loop: a faster one is worth writing.
        """
        buffer = self.buffer(tensor, elementwise=True)
        same = (buffer.shape, buffer.dtype, buffer.strides, buffer.device) == (
            like.shape,
            like.dtype,
            like.strides,
            like.device,
        )
        return buffer.address if same and buffer.wait is None else None

    @abstractmethod
    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        """A new tensor of ``like``'s type and device; ``shape`` None: also of its shape and layout."""

    @abstractmethod
    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """The tensor whose elements stand in ``memory`` (row-major): without a copy where the framework can."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """target[...] = source."""
