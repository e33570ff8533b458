"""The cluster contract: how another launcher is recognised, and how the rank that it gave to this process is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cluster", "RankInfo", "Surroundings"]


def _alone() -> Sequence[Sequence[str]]:
    return ()


@dataclass(frozen=True)
class Surroundings:
    """The facts that a process knows about itself without asking others.

    It consists of plain data and a function, so tests can make one without a launcher.
    """

    variables: Mapping[str, str]
    host: str = ""  # the host's own name
    lineage: Callable[[], Sequence[Sequence[str]]] = _alone  # command lines of its parents, nearest first


@dataclass(frozen=True)
class RankInfo:
    """The rank that another launcher has given to this process, and where the launcher has placed the process.

    ``launch`` is a text that is equal on all ranks of one launch, and that no other launch has at the same time. It is
    empty if the launcher provides no such text. ``host`` is a text that is equal for ranks of the launch on the same
    host. If it is empty, the ranks find out by themselves which of them share a host.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    host: str = ""
    launch: str = ""
    warning: str = ""  # one line for the user, who may have intended something else

    @property
    def on_one_host(self) -> bool:
        """Return whether all ranks share a host, as far as the launcher says."""
        return self.local_size == self.size


class Cluster(ABC):
    """A launcher that is recognised by the variables it sets.

    It has no state: equal surroundings give equal results.
    """

    @abstractmethod
    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return the rank info of this process, or None if this launcher has not started the process.

        Raises ValueError, in one line that names the variable, if the variables are incomplete or contradict each
        other.
        """
