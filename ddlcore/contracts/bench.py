"""The bench peer contract: another library's collectives, which ``ddl bench`` measures with the same bytes as ddl's.

The rules:

* ``open`` connects to the other ranks through ``context.store``. It must not change any other use of that library in
  this process (its default group, for example).
* ``operation`` is called before the time is measured, and prepares everything that can be prepared. Each call of the
  function that it returns runs the collective once, to its end. All ranks create and call the same functions in the
  same order, on the thread that called ``open``.
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

    ``floor``: True if the class does only the work that no implementation can avoid. Then ``ddl bench`` does not check
    its results.
    """

    floor = False

    @abstractmethod
    def open(self, context: Context) -> None:
        """Connect to the other ranks. All ranks call this.

        Raises DeadlineExceeded after ``context.timeout_s`` seconds.
        """

    @abstractmethod
    def operation(self, kind: Kind, source: Array, target: Array) -> Callable[[], object]:
        """Prepare the collective ``kind`` of these arrays, and return a function that runs it each time it is called.

        ALLREDUCE and BROADCAST (from rank 0) work in place: ``target`` is ``source``. For ALLGATHER, ``target``
        receives the sources of all ranks, one after the other; for REDUCESCATTER, this rank's part of the sum; for
        ALLTOALL, one part from each rank, all of the same size.

        Raises NotImplementedError if the library does not support the kind or the element type. Then ``ddl bench`` does
        not measure it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. A second call has no effect. The processes of other ranks may already have ended."""
