"""Decides whether a part of an elastic job may form the next world, where another part may have a coordinator, too.

It does no I/O. docs/design/elastic.md argues why two parts of a job never both may, though each knows of other deaths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddlcore.messages.elastic import Ballot, Opened, Process


class Quorum:
    """The worlds of one elastic job that may live, as one coordinator knows them, and which processes certainly died.

    What happened may be recorded in any order, but in one thread.
    """

    def __init__(self, worlds: Iterable[Opened] = ()) -> None:
        """Begin with ``worlds``: those that agents tell a successor of the coordinator."""
        self._worlds = {one.ballot: one for one in worlds}
        self._dead: set[Process] = set()
        self.effective: Ballot = (0, 0)  # the newest world that all its members have received; (0, 0): none is known

    def opened(self, world: Opened) -> None:
        """Record that ``world`` has opened.

        A successor of the coordinator learns of older worlds from agents, while members that register with it tell that
        a later one has begun: then the older ones do not count.
        """
        if world.ballot >= self.effective:
            self._worlds[world.ballot] = world

    def began(self, ballot: Ballot) -> None:
        """Record that all members of the world ``ballot`` have received it.

        Older worlds do not count any more.
        """
        if ballot > self.effective:
            self.effective = ballot
            self._worlds = {key: world for key, world in self._worlds.items() if key >= ballot}

    def died(self, process: Process) -> None:
        """Record that ``process`` has certainly died. A process whose host is only silent may live and train on."""
        self._dead.add(process)

    def counts(self, process: Process) -> bool:
        """Return whether ``process`` is a member of a world that may live."""
        return any(process in world.processes for world in self._worlds.values())

    def objection(self, present: Collection[Process]) -> str:
        """Return why ``present``, the registered processes, may not form a world; "" if they may.

        They must be a quorum of the newest world that is effective, and of each later one, because that may be effective,
        too. A quorum of a world is more than half of its members without those that have certainly died; or exactly half
        of them, with the first of these. The order of the members, and so the first, is fixed when the world opens.
        """
        if self.effective != (0, 0) and self.effective not in self._worlds:
            return f"nothing is known of world {self.effective[0]}, in which a member of this part has trained"
        for ballot, world in sorted(self._worlds.items()):
            voters = [process for process in world.processes if process not in self._dead]
            here = [process for process in voters if process in present]
            if 2 * len(here) < len(voters) or (2 * len(here) == len(voters) and voters[:1] != here[:1]):
                return (
                    f"only {len(here)} of {len(voters)} ranks of world {ballot[0]} that may be alive are in this part of "
                    "the job; it must not go on, because the others may do so. A part goes on if it has more than half of "
                    "them, or exactly half and one on the host of the launcher"
                )
        return ""
