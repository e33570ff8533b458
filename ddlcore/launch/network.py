"""Opens the control network of one launch, and remembers which rank was the first to leave in anger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddlcore.config import Settings
from ddlcore.control.coordinator_protocol import CoordinatorProtocol, Outgoing
from ddlcore.control.server import Server
from ddlcore.job import build_sessions
from ddlcore.messages import Bye, Differ, Profile, Pulse, ToCoordinator
from ddlcore.plug.registry import Registry
from ddlcore.runtime.tuning import SearchDriver

if TYPE_CHECKING:
    from ddlcore.launch.remote_launch import RemoteLaunch

__all__ = ["FailureLog", "open_network"]

_SECONDARY = ("PeerLost", "Closed", "DdlInternalError")  # raised because of what another rank did


class FailureLog:
    """A coordinator that notes, beside another that decides, who said that it leaves because of an exception."""

    def __init__(self, coordinator: CoordinatorProtocol, dead: Callable[[], Mapping[int, str]] = dict) -> None:
        """``dead``: ranks without which a stall has ended the job, since they do not answer, with what is known of each."""
        self.kill: Callable[[int, str], None] | None = None  # once the ranks run
        self._dead = dead
        self._killed: set[int] = set()
        self.raised: list[int] = []  # in that order
        self.differ = ""  # how the ranks' parameters differ, where that ended the job
        self.heard: Callable[[int, Pulse | Profile], None] = lambda rank, message: None
        self._coordinator = coordinator

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing:
        if isinstance(message, (Pulse, Profile)):
            self.heard(rank, message)
            return []
        if isinstance(message, Bye) and rank not in self.raised and _is_cause(message.reason):
            self.raised.append(rank)
        return self._noted(self._coordinator.handle(rank, message))

    def rank_ended(self, rank: int, reason: str) -> Outgoing:
        return self._noted(self._coordinator.rank_ended(rank, reason))

    def _noted(self, outgoing: Outgoing) -> Outgoing:
        for _, message in outgoing:
            if isinstance(message, Differ):
                self.differ = message.text
        return outgoing

    def lost(self) -> dict[int, str]:
        return self._coordinator.lost()

    def due(self) -> Outgoing:
        return self._noted(self._coordinator.due())

    def overdue(self, now_s: float) -> list[str]:
        texts = self._coordinator.overdue(now_s)
        for rank, why in self._dead().items():
            if rank not in self._killed and self.kill is not None:
                self._killed.add(rank)
                self.kill(rank, why)
        return texts


def _is_cause(reason: str) -> bool:
    """Whether a rank that leaves for this reason does so by itself, not because of another's loss."""
    if reason.startswith("raised "):
        return reason.split()[1].rstrip(":") not in _SECONDARY
    if reason.startswith("ended its script"):  # sys.exit(3), say; who has lost another says nothing when it ends
        return True
    return reason.startswith("init failed: ") and " lost during init" not in reason


def open_network(
    size: int,
    settings: Settings,
    registry: Registry,
    say: Callable[[str], None],
    remote: RemoteLaunch | None = None,
    driver: SearchDriver | None = None,
) -> tuple[Server, FailureLog]:
    """A server that is not yet started: its job file stands, its thread does not run. ``remote``: it has agents.

    ``driver`` looks for better settings meanwhile.
    Raises ValueError for a ``control_address`` that is none, DdlInternalError where it is in use.
    """
    sessions = build_sessions(size, settings, registry, driver)
    failure_log = FailureLog(sessions, sessions.dead)
    if remote is None:
        return Server(size, failure_log, settings.text("control_address"), report=say), failure_log
    address, silence_s = remote.remote_plan.reach.bind, settings.number("silence_s")
    return Server(size, failure_log, address, say, agents=remote.agents, silence_s=silence_s), failure_log
