"""The bench peer contract: another library's collectives, timed by `ddl bench` on the same bytes as ddl's own.

The rules, said once:

* ``open`` meets the other ranks over ``context.store``. Whatever else the process does with that
  library (a default group, say) stays untouched.
* ``operation`` is called before anything is timed, and makes all that can be made beforehand; what
  it returns carries the collective out once, to its end, whenever it is called. All ranks make and
  call the same ones in the same order, from the thread that opened.
* Arrays are numpy's, one-dimensional and contiguous; reductions are sums. Ranks hand in equally much.
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
    """One rank's part in a group of all ranks, from open to close.

    ``floor``: it only does what no implementation can leave out, and its results are not looked at.
    """

    floor = False

    @abstractmethod
    def open(self, context: Context) -> None:
        """Meets the other ranks; all of them call it. Raises DeadlineExceeded past ``context.timeout_s``."""

    @abstractmethod
    def operation(self, kind: Kind, source: Array, target: Array) -> Callable[[], object]:
        """The collective ``kind`` of these arrays, ready to be called again and again.

        ALLREDUCE and BROADCAST (from rank 0) are in place: ``target`` is ``source``. ALLGATHER's target has
        the sources of all ranks, one behind the other; REDUCESCATTER's this rank's part of the sum;
        ALLTOALL's one equal part from each rank.

        Raises NotImplementedError for a kind or element type that the library does not have: it is left out.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything; idempotent. Peers may be gone already."""
