"""The communicators contract: how a user passes a communicator of another library to ``init``.

It also says whether the user's program may call that library during a job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Communicators"]


class Communicators(ABC):
    """The facts that a library for message passing knows about the launched processes.

    The class is built without arguments.
    """

    @abstractmethod
    def ranks_of(self, comm: Any, rank: int, size: int) -> Sequence[int]:
        """Return the launched ranks of the processes in the communicator ``comm``, in the order of ``comm``.

        Every process of ``comm`` must call this. ``rank``: this process's rank among the launched processes. ``size``:
        the number of launched processes. Raises ValueError, with one line of advice, if the library's own ranks do not
        agree with ``rank`` and ``size``.
        """

    @abstractmethod
    def threads_supported(self, size: int) -> bool:
        """Return whether any thread of the user's program may call the library while a job runs.

        ``size``: the number of launched processes. Every process must call this, because the call may wait for the
        other processes. Raises ValueError, with one line of advice, if the library does not connect the processes.
        """
