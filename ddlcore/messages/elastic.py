"""The messages and records of an elastic job: who is a member of which world."""

from __future__ import annotations

import msgspec

from ddlcore.messages.ranks import LaunchedRank, StartNumber

Process = tuple[LaunchedRank, StartNumber]  # one process of an elastic job
Ballot = tuple[int, int]  # a world of an elastic job: its generation, and the number of the coordinator that opened it


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """Asks for membership in the next world of an elastic job. A process sends this message when it is in no world.

    The answer is ``NextWorld``, ``Complete``, ``Dismissed`` or ``Refused``. The answer may come only when the other
    processes have finished their training.
    """

    protocol: int
    version: str
    generation: int  # of the newest world of which this process was a member; 0: of none
    steps: int  # how many steps its state contains; -1: it has no state yet
    reason: str  # why it has left that world; "" at an agreed call
    again: int = 0  # how many steps after ``steps`` it had computed, wholly or in part, and has given up
    effective: Ballot = (0, 0)  # the newest world in which all members have taken over the state; (0, 0): none


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Reports that all members of a world have reached the end of the training. Any member may send this."""

    generation: int


class WorldReport(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a world of an elastic job when it begins. Ranks are those of the launch.

    The fields after ``still_s`` are totals since the beginning of the job.
    """

    generation: int
    size: int
    lost: tuple[LaunchedRank, ...] = ()  # ranks that have failed since the world before
    joined: tuple[LaunchedRank, ...] = ()  # ranks that were not in the world before, or whose processes are new
    left: tuple[LaunchedRank, ...] = ()  # ranks of the world before that have left without a failure
    recomputed: int = 0  # steps that are computed again
    still_s: float = 0.0  # for how long the training has stood still before this world
    ranks_lost: int = 0
    ranks_joined: int = 0
    seconds_lost: float = 0.0
    text: str = ""  # what the user was told; "" for the first world


class NextWorld(msgspec.Struct, frozen=True, array_like=True, tag="world"):
    """The answer to Register: the process is a member of the next world of an elastic job.

    A place is the number of a process in the launch. ``members`` are the places of the members, in the order of their
    ranks in this world. ``hosts`` contains the host index of each place of the launch. All members copy the state of
    the member at place ``root``.
    """

    generation: int
    members: tuple[LaunchedRank, ...]
    hosts: tuple[int, ...]
    root: LaunchedRank
    before: int  # the number of members of the world before this one; 0 for the first
    coordinator: int = 0  # the number of the coordinator that opened it; 0: the launcher

    @property
    def ballot(self) -> Ballot:
        """The name of this world. Two coordinators may count to the same generation, but their ballots differ."""
        return self.generation, self.coordinator


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The news to all agents of an elastic job that a world opens. It is sent before any member gets the world.

    With it, a successor of the coordinator knows of every world that a process of these agents may have received.
    """

    ballot: Ballot
    processes: tuple[Process, ...]  # the members; the first one decides between two halves
    places: tuple[LaunchedRank, ...]  # the members' places, in the order of their ranks
    hosts: tuple[int, ...]  # the host index of each place of the launch
    steps: int  # the most steps that a member had applied
    effective: Ballot  # the newest world that is known to have been received by all its members
    taken: Ballot = (0, 0)  # the newest world whose members are known to have taken over the state; (0, 0): none
    ranks_lost: int = 0  # this and the next two: totals since the beginning of the job
    ranks_joined: int = 0
    seconds_lost: float = 0.0
    complete: bool = False  # its members have reached the end of the training
    stopped: str = ""  # why they stop at a call of ``should_stop()`` on which they have agreed


class Complete(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """The answer to Register if all members of the last world have reached the end of the training."""


class CoordinatorLost(msgspec.Struct, frozen=True, array_like=True, tag="coordinatorlost"):
    """The message of an agent to each rank of its host that the coordinator is lost, and another one takes its place.

    The world of the rank has ended, also if all its members live. The rank registers for the next one on a new connection.
    """

    reason: str


class Dismissed(msgspec.Struct, frozen=True, array_like=True, tag="dismissed"):
    """The answer to Register if the process must leave the training, because its host leaves the job."""

    reason: str
