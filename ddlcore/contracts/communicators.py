"""The communicators contract: worlds made from another library's communicators, and that library's calls next to ddl's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Communicators"]


class Communicators(ABC):
    """What a message-passing library knows about the launched processes. It is constructed without arguments."""

    @abstractmethod
    def ranks_of(self, comm: Any, rank: int, size: int) -> Sequence[int]:
        """Return the launched ranks of the processes in ``comm``, in the order of ``comm``.

        Every process of ``comm`` calls it.

        ``rank`` and ``size``: this process's rank among the launched processes, and their number. Raises ValueError, in
        one line with advice, if the library's own ranks do not agree with them.
        """

    @abstractmethod
    def threads_supported(self, size: int) -> bool:
        """Return whether any thread may call the library while a job runs.

        ``size``: the number of launched processes. Every process calls it, because it may wait for the others. Raises
        ValueError, in one line with advice, if the library does not connect the processes.
        """
