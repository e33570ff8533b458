"""The cluster contract: how ddl recognises another launcher, and reads the rank that it has given to this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cluster", "RankInfo", "Surroundings"]


def _alone() -> Sequence[Sequence[str]]:
    return ()


@dataclass(frozen=True)
class Surroundings:
    """The facts that a process knows about itself without asking other processes.

    An object of this class consists of plain data and a function, so tests can create such an object without a
    launcher.
    """

    variables: Mapping[str, str]  # the environment variables
    host: str = ""  # the host's own name
    lineage: Callable[[], Sequence[Sequence[str]]] = _alone  # command lines of the parent processes, nearest first


@dataclass(frozen=True)
class RankInfo:
    """The rank that another launcher has given to this process, and the host where the process runs.

    ``launch`` is a text that is equal on all ranks of one launch, and that no other launch has at the same time.
    ``launch`` is empty if the launcher provides no such text. ``host`` is a text that is equal for those ranks of the
    launch that are on the same host. If ``host`` is empty, the ranks find out by themselves which ranks share a host.
    ``local_rank`` and ``local_size`` are None if the launcher does not provide them.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    host: str = ""
    launch: str = ""
    warning: str = ""  # one line for the user, if the user may have intended something else

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share one host. False if the launcher does not provide ``local_size``."""
        return self.local_size == self.size


class Cluster(ABC):
    """A launcher that ddl recognises by the environment variables that the launcher sets.

    A Cluster has no state: equal surroundings give equal results.
    """

    @abstractmethod
    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return the rank info of this process, or None if this launcher has not started the process.

        ``around``: what the process knows about itself. Raises ValueError if the launcher's variables are incomplete or
        contradict each other. The message is one line that names the variable.
        """
