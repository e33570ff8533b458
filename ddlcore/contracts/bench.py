"""The bench peer contract: another library's collectives, which `ddl bench` times on the same bytes as ddl's own.

The rules:

* ``open`` meets the other ranks through ``context.store``. It must not change anything else that the process does with
  that library (its default group, for example).
* ``operation`` is called before the timing starts, and prepares everything that can be prepared. Each call of the
  function that it returns runs the collective once, to its end. All ranks create and call the same functions in the
  same order, from the thread that called ``open``.
* Arrays are one-dimensional, contiguous numpy arrays. Reductions are sums. All ranks pass the same number of elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ddlcore.contracts.transport import Context
from ddlcore.types import Kind

__all__ = ["BenchPeer"]

Array = Any  # numpy.ndarray; numpy's own types would make every caller import them


class BenchPeer(ABC):
    """One rank's member of a group of all ranks, from ``open`` to ``close``.

    ``floor``: True if it does only the work that no implementation can avoid; `ddl bench` then does not check its
    results.
    """

    floor = False

    @abstractmethod
    def open(self, context: Context) -> None:
        """Meet the other ranks; all of them call it. Raises DeadlineExceeded after ``context.timeout_s`` seconds."""

    @abstractmethod
    def operation(self, kind: Kind, source: Array, target: Array) -> Callable[[], object]:
        """Prepare the collective ``kind`` of these arrays, and return a function that runs it each time it is called.

        ALLREDUCE and BROADCAST (from rank 0) work in place: ``target`` is ``source``. The target of ALLGATHER receives
        the sources of all ranks, one after the other; that of REDUCESCATTER receives this rank's part of the sum; that
        of ALLTOALL receives one equal part from each rank.

        Raises NotImplementedError if the library does not support the kind or the element type; `ddl bench` then skips
        it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it again has no effect. The peers may already have exited."""
