"""Says where a process is: in the launch, and in one world."""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.messages.ranks import LaunchedRank
from ddlcore.types import Placement


@dataclass(frozen=True)
class WorldPlace:
    """Which of the launched processes this one is, and which world it enters.

    ``launched``: where the launcher placed this process. ``ranks``: the launched ranks that are in this world, in the
    order of their ranks there. ``ordinal``: how many times this process has asked for a world of these ranks, with this
    time; in an ``elastic`` job, the generation of the world.
    """

    launched: Placement
    ranks: tuple[LaunchedRank, ...]
    ordinal: int
    elastic: bool = False
    address: str = ""  # this host's own address, see Context.address
    launched_by: str = ""  # name of the launcher; some transports work only with one launcher
    timeline_dir: str = ""  # directory in which the launcher expects this rank's part of a timeline; "": none

    @property
    def placement(self) -> Placement:
        """This process among the ranks of its world."""
        return self.launched.among(self.ranks)
