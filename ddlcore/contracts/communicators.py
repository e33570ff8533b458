"""The communicators contract: worlds made of another library's communicators, and its own calls beside ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Communicators"]


class Communicators(ABC):
    """What a library of message passing knows of the processes that were launched. Built without arguments."""

    @abstractmethod
    def ranks_of(self, comm: Any, rank: int, size: int) -> Sequence[int]:
        """The launched ranks of ``comm``'s processes, in its order; every process of ``comm`` calls it.

        ``rank`` and ``size`` are this process's own among those that were launched. Raises ValueError, in
        one line that says what next, where the library has another idea of who they are.
        """

    @abstractmethod
    def threads_supported(self, size: int) -> bool:
        """Whether the library may be called from any thread while a job runs.

        ``size``: how many processes were launched. Raises ValueError, in one line that says what next,
        where the library does not connect them. Every process calls it, as it may wait for the others.
        """
