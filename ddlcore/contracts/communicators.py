"""The communicators contract: worlds made from another library's communicators, and calls of that library in a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Communicators"]


class Communicators(ABC):
    """The facts that a message-passing library knows about the launched processes. It is built without arguments."""

    @abstractmethod
    def ranks_of(self, comm: Any, rank: int, size: int) -> Sequence[int]:
        """Return the launched ranks of the processes in ``comm``, in the order of ``comm``.

        Every process of ``comm`` must call this.

        ``rank`` is this process's rank among the launched processes, and ``size`` is their number. Raises ValueError,
        in one line with advice, if the library's own ranks do not agree with these.
        """

    @abstractmethod
    def threads_supported(self, size: int) -> bool:
        """Return whether any thread may call the library while a job runs.

        ``size``: the number of launched processes. Every process must call this, because it may wait for the others.
        Raises ValueError, in one line with advice, if the library does not connect the processes.
        """
