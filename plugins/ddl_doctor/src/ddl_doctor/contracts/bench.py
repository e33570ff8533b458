"""The bench peer contract: how ``ddl bench`` measures the collectives of another library.

``ddl bench`` measures them with the same numbers of bytes as ddl's own collectives. The rules:

* ``open`` connects to the other ranks through ``context.store``. ``open`` must not change any other use of that library
  in this process, such as the library's default group.
* ``operation`` is called before the time is measured, and prepares everything that can be prepared. Each call of the
  returned function runs the collective once, to its end. All ranks create and call the same functions in the same
  order, on the thread that called ``open``.
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
    """The connection of this rank to a group of all ranks in another library, from ``open`` to ``close``.

    ``floor``: True if the class is not a real implementation but a lower bound for the time: it does only the work that
    no implementation can avoid. Then ``ddl bench`` does not check the results of the collectives.
    """

    floor = False

    @abstractmethod
    def open(self, context: Context) -> None:
        """Connect to the other ranks. All ranks call this.

        Raises DeadlineExceeded if not all ranks are connected after ``context.timeout_s`` seconds.
        """

    @abstractmethod
    def operation(self, kind: Kind, source: Array, target: Array) -> Callable[[], object]:
        """Prepare the collective ``kind`` for two arrays. Return a function that runs the collective once per call.

        ALLREDUCE and BROADCAST (from rank 0) work in place: ``target`` is ``source``. For ALLGATHER, ``target``
        receives the sources of all ranks, one after the other. For REDUCESCATTER, ``target`` receives this rank's part
        of the sum. For ALLTOALL, ``target`` receives one part from each rank, all of the same size.

        Raises NotImplementedError if the library does not support the kind or the element type. Then ``ddl bench`` does
        not measure this collective.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections and free all memory. A second call has no effect.

        The processes of other ranks may already have ended.
        """
