"""Records the last world of an elastic job that has opened, and who takes no further part in it. It decides nothing."""

from __future__ import annotations

from ddlcore.messages.elastic import Ballot
from ddlcore.messages.ranks import LaunchedRank


class PresentWorld:
    """The last world that has opened. Before the first one, there are no members, and the generation is 0."""

    def __init__(self) -> None:
        self.ballot: Ballot = (0, 0)
        self.members: tuple[LaunchedRank, ...] = ()  # their places, in the order of their ranks
        self.gone: dict[LaunchedRank, str] = {}  # members that have left the world or have ended, and why
        self._places: frozenset[LaunchedRank] = frozenset()

    @property
    def generation(self) -> int:
        """The number of the world, counted from 1; 0 if no world has opened."""
        return self.ballot[0]

    def open(self, ballot: Ballot, members: tuple[LaunchedRank, ...]) -> None:
        """Record that the world ``ballot`` opens. ``members`` are the places of its members, in their order."""
        self.ballot, self.members, self._places = ballot, members, frozenset(members)
        self.gone = {}

    def has(self, place: LaunchedRank) -> bool:
        """Return whether the process at ``place`` is a member."""
        return place in self._places

    def leave(self, place: LaunchedRank, reason: str) -> None:
        """Record that the process at ``place`` takes no further part in the world, if it is a member."""
        if place in self._places:
            self.gone.setdefault(place, reason)

    def present(self) -> list[LaunchedRank]:
        """Return the members that have not left the world."""
        return [place for place in self.members if place not in self.gone]

    def broken(self, generation: int) -> tuple[LaunchedRank, str] | None:
        """Return a member that can take no further part in world ``generation``, and why; None if there is none."""
        if not self.generation or generation != self.generation:
            return self.members[0] if self.members else LaunchedRank(0), "it belongs to a newer world"
        return next(iter(self.gone.items()), None)
