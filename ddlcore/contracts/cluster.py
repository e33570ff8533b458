"""The cluster contract: who am I, where a launcher that is not ours has started this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cluster", "RankInfo", "Surroundings"]


def _alone() -> Sequence[Sequence[str]]:
    return ()


@dataclass(frozen=True)
class Surroundings:
    """What a process knows of itself without asking anybody: a mapping and a function, so that tests need no launcher."""

    variables: Mapping[str, str]
    host: str = ""  # what it calls itself
    lineage: Callable[[], Sequence[Sequence[str]]] = _alone  # command lines of its parents, nearest first


@dataclass(frozen=True)
class RankInfo:
    """Where a launcher has put this process, in its own words.

    ``launch`` is the same text on all ranks of one launch, and no other launch that runs at the same
    time has it; "" where the launcher says nothing of the kind. ``host`` likewise names this process's
    host among those of the launch; "" lets the ranks find out by themselves who shares one.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    host: str = ""
    launch: str = ""
    warning: str = ""  # one line for the user, who may have meant something else

    @property
    def on_one_host(self) -> bool:
        """Whether the launcher says that all ranks share a host."""
        return self.local_size == self.size


class Cluster(ABC):
    """A launcher that is known by what it sets. Pure: the same surroundings give the same rank info."""

    @abstractmethod
    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """This process's rank info; None where this launcher has not started it.

        Raises ValueError in one line, which names the variable, where what it set is incomplete or
        contradicts itself.
        """
