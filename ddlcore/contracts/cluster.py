"""The cluster contract: recognises another launcher, and reads the rank that it has given to this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cluster", "RankInfo", "Surroundings"]


def _alone() -> Sequence[Sequence[str]]:
    return ()


@dataclass(frozen=True)
class Surroundings:
    """What a process knows about itself without asking others.

    It is plain data and a function, so tests need no launcher.
    """

    variables: Mapping[str, str]
    host: str = ""  # the host's own name
    lineage: Callable[[], Sequence[Sequence[str]]] = _alone  # command lines of its parents, nearest first


@dataclass(frozen=True)
class RankInfo:
    """Where another launcher has placed this process, in that launcher's terms.

    ``launch`` is the same text on all ranks of one launch, and no other launch that runs at the same time has it; "" if
    the launcher gives no such text. ``host`` names this process's host among the hosts of the launch in the same way;
    "" makes the ranks find out by themselves which of them share a host.
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
        """Return whether the launcher says that all ranks share a host."""
        return self.local_size == self.size


class Cluster(ABC):
    """A launcher that is recognised by the variables it sets. Pure: the same surroundings give the same rank info."""

    @abstractmethod
    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return this process's rank info; None if this launcher has not started it.

        Raises ValueError, in one line that names the variable, if the variables are incomplete or contradict each
        other.
        """
