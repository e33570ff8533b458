"""Records what the launcher knows of one agent, from the agent's messages."""

from __future__ import annotations

from ddlcore.contracts.launcher import AgentPlace
from ddlcore.launch.agents.wire import Adopt, Begun, Credit, Report
from ddlcore.messages.ranks import LaunchedRank


class Agent:
    """The state of one agent, as the launcher knows it."""

    def __init__(self, place: AgentPlace, credit: Credit, late: bool = False) -> None:
        """Begin with an agent that has said nothing yet.

        ``credit`` sends it the data of streams. ``late``: it is started while ranks are already running.
        """
        self.place = place
        self.credit = credit
        self.late = late
        # The ranks that the agent runs or has run. The list grows if more ranks are started there later.
        self.ranks = list(map(LaunchedRank, place.ranks))
        self.served = set(self.ranks)  # all ranks that it has ever run
        self.here = False  # the first message, Here, has arrived
        self.report: Report | None = None
        self.begun: Begun | None = None
        self.adopted: Adopt | None = None  # what the agent has told this process, a successor of the agent's launcher
        self.wants_to_leave = False  # the agent's host will leave the job
        self.finished = False  # Finished has arrived, or the launcher has sent Quit
        self.gone = ""  # why the agent is lost and sends no more messages; "": it is not lost

    @property
    def over(self) -> bool:
        return self.finished or bool(self.gone)
