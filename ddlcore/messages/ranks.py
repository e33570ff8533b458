"""Names the numbers of a process that code could mix up. All are plain ints at run time and in messages."""

from __future__ import annotations

from typing import NewType, TypeVar

# The number that the launcher gives a process: RANK in its environment, and what users read in messages about processes.
# In an elastic job, one process after the other may run with the same launched rank, also on different hosts.
LaunchedRank = NewType("LaunchedRank", int)

# How many processes ran with a launched rank before this one. A launched rank and a start number name one process.
StartNumber = NewType("StartNumber", int)
FIRST_START = StartNumber(0)

# The position of a process among the members of one world, which is what ``rank()`` returns. It differs from the launched
# rank in a world of some of the ranks (``init(comm=[ranks])``), and in an elastic job after a member was lost.
# ``RunningWorld`` translates between the two on the coordinator's side, ``WorldPlace`` on the rank's side.
WorldRank = NewType("WorldRank", int)

AnyRank = TypeVar("AnyRank", bound=int)  # for what serves ranks of either kind, but no mixture of both
