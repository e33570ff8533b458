"""Open the control network of one launch, and record which ranks report an exception, in the order of their reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddlcore.config.loading import Settings
from ddlcore.control.coordinator_protocol import CoordinatorProtocol
from ddlcore.control.server import Server
from ddlcore.coordinator.membership import ElasticMembership
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.launch.job.handover import tell_of_world
from ddlcore.launch.job.history import History
from ddlcore.launch.job.host_table import HostTable
from ddlcore.launch.job.watch import Watches
from ddlcore.launch.ranks.exit_status import End, exit_code
from ddlcore.messages.elastic import Ballot, Finished, NextWorld, Register, WorldReport
from ddlcore.messages.observing import Differ, Observation
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import STOP, Bye, ToCoordinator
from ddlcore.messages.to_rank import AgreedCall, FromCoordinator, Outgoing, Refused, Welcome
from ddlcore.plug.registry import Registry
from ddlcore.process.build import build_sessions
from ddlcore.process.job import log_at

if TYPE_CHECKING:
    from ddlcore.launch.agents.remote_launch import RemoteLaunch

log = logging.getLogger("ddl")
_SECONDARY = ("PeerLost", "Closed", "DdlInternalError")  # raised because another rank failed


class ObservedCoordinator:
    """A wrapper around a coordinator. The wrapper records which ranks leave because of an exception.

    The wrapper passes all calls on to the coordinator, except observations (messages in which a rank reports its own
    state). ``watches`` get all messages, and the coordinator's answers.
    """

    def __init__(
        self,
        coordinator: CoordinatorProtocol,
        dead: Callable[[], Mapping[LaunchedRank, str]] = dict,
        watches: Watches | None = None,
        history: History | None = None,
        opened: Callable[[str], None] = lambda stopped: None,
        told_stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Wrap ``coordinator``. ``watches`` are told of all messages. ``history`` is that of the worlds of an elastic job.

        ``dead()`` returns the ranks that did not answer when a stall ended the job. For each such rank, it returns a
        text that describes the state of the rank. ``opened`` is called when a world opens, and again when more is known
        of it, before its members are told; it gets the reason why the ranks stop, or "". ``told_stop`` is called once
        with this reason, when it is known.
        """
        # Kills a rank, with a reason. It is set when the ranks run.
        self.kill: Callable[[LaunchedRank, str], None] | None = None
        self._dead = dead
        self._killed: set[LaunchedRank] = set()
        self.raised: list[LaunchedRank] = []  # in the order of their reports
        self.stopped = ""  # why the ranks stop at a call of ``should_stop()``; "": they were not asked to stop
        self.differ = ""  # how the ranks' parameters differ, if this difference ended the job
        self.history = history
        self._world_opened = opened
        self._told_stop = told_stop
        self._finished = 0  # the last world whose members have reached the end of the training
        self._opened: Ballot = (0, 0)
        self._report: WorldReport | None = None
        self._coordinator = coordinator
        self._watches = watches

    def handle(self, rank: LaunchedRank, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        if isinstance(message, Observation):
            if self._watches is not None:
                self._watches.heard(rank, message)
            return []
        if isinstance(message, Bye) and rank not in self.raised and _is_cause(message.reason):
            self.raised.append(rank)
        elif isinstance(message, Register) and rank in self.raised:
            self.raised.remove(rank)  # it goes on
        if isinstance(message, Register):
            log.debug("rank %d: %s", rank, message)
        if self.history is not None:
            self.history.heard(rank, message)
        outgoing = self.noted(self._coordinator.handle(rank, message))
        if isinstance(message, Finished) and message.generation != self._finished:
            self._finished = message.generation
            self._world_opened(self.stopped)  # a successor must know that the training is complete
        if self._watches is not None:
            self._watches.passed(rank, message, outgoing)
        return outgoing

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        return self.noted(self._coordinator.rank_ended(rank, reason, certain))

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> Outgoing[LaunchedRank]:
        if rank in self.raised:
            self.raised.remove(rank)
        self._killed.discard(rank)
        return self._coordinator.rank_started(rank, host)

    def dismiss(self, ranks: Collection[LaunchedRank], reason: str) -> Outgoing[LaunchedRank]:
        return self.noted(self._coordinator.dismiss(ranks, reason))

    def noted(self, outgoing: Outgoing[LaunchedRank]) -> Outgoing[LaunchedRank]:
        """Take note of ``outgoing``, messages of the coordinator, and return them."""
        if self.history is not None:
            outgoing = _told(outgoing, self.history)
        for rank, message in outgoing:
            if isinstance(message, NextWorld) and message.ballot != self._opened:
                self._opened = message.ballot
                self._world_opened(self.stopped)
            elif isinstance(message, Refused):
                log.debug("to rank %d: %s", rank, message)
            elif isinstance(message, Welcome) and message.report is not None and message.report is not self._report:
                self._report = message.report
                self._world_opened(self.stopped)  # with new totals
            if isinstance(message, Differ):
                self.differ = message.text
            elif isinstance(message, AgreedCall) and message.kind == STOP and not self.stopped:
                self.stopped = message.reason
                self._told_stop(message.reason)
                self._world_opened(self.stopped)  # and that it stops
        return outgoing

    def exit_code(self, ends: Sequence[End], killed: bool) -> int:
        """Return the launcher's exit code after ``ends`` of the ranks. ``killed``: the launcher has killed all of them."""
        stopped = bool(self.stopped) and not self.differ
        return exit_code(ends, self.raised, killed=killed, stopped=stopped) or int(bool(self.differ))

    def lost(self) -> dict[LaunchedRank, str]:
        return self._coordinator.lost()

    def due(self) -> Outgoing[LaunchedRank]:
        return self.noted(self._coordinator.due())

    def overdue(self, now_s: float) -> list[str]:
        texts = self._coordinator.overdue(now_s)
        for rank, why in self._dead().items():
            if rank not in self._killed and self.kill is not None:
                self._killed.add(rank)
                self.kill(rank, why)
        return texts


def _told(outgoing: Outgoing[LaunchedRank], history: History) -> Outgoing[LaunchedRank]:
    """Tell ``history`` of the messages to ranks, and return those to send. Ranks that get the same get the same object."""
    once: dict[int, FromCoordinator] = {}  # by identity, so that thousands of ranks get a message that is made once
    for _, message in outgoing:
        if id(message) not in once:
            once[id(message)] = history.told(message)
    return [(rank, once[id(message)]) for rank, message in outgoing]


def _is_cause(reason: str) -> bool:
    """Return True if a rank that leaves for ``reason`` has failed itself, False if a lost rank is the cause."""
    if reason.startswith("raised "):
        return reason.split()[1].rstrip(":") not in _SECONDARY
    if reason.startswith("ended its script"):  # as by sys.exit(3); never reported after the loss of another rank
        return True
    return reason.startswith("init failed: ") and " lost during init" not in reason


def open_network(
    size: int,
    settings: Settings,
    registry: Registry,
    say: Callable[[str], None],
    remote: RemoteLaunch | None = None,
    driver: SearchDriver | None = None,
    membership: ElasticMembership | None = None,
    watches: Watches | None = None,
    table: HostTable | None = None,
    told_stop: Callable[[str], None] = lambda reason: None,
) -> tuple[Server, ObservedCoordinator]:
    """Create the control server of one launch for ranks 0 to ``size`` - 1, and the failure log around its coordinator.

    After this call the job file exists, but the server's thread is not yet started. ``remote`` is the remote launch,
    or None if the job has no agents. ``driver`` searches for better settings while the job runs; None means no search.
    ``membership`` decides about the worlds of an elastic job, and ``table`` has its hosts; None means that the job is not
    elastic. ``watches`` observe the job. ``say`` is called with lines for the user. ``told_stop``: see ObservedCoordinator. Raises
    ValueError for a malformed setting ``control_address``, and DdlInternalError if this address is in use or if this
    process may not open enough files.
    """
    if settings.text("log_level") == "DEBUG":  # this process may be the user's own, with a logging of its own
        log_at("DEBUG")
    sessions = build_sessions(size, settings, registry, driver, membership=membership)
    if remote is None:
        history = None if membership is None else History(say)
        observed = ObservedCoordinator(sessions, sessions.dead, watches, history, told_stop=told_stop)
        return Server(size, observed, settings.text("control_address"), report=say), observed
    address, silence_s = remote.remote_plan.reach.bind, settings.number("silence_s")
    if membership is None or table is None:
        observed = ObservedCoordinator(sessions, sessions.dead, watches, told_stop=told_stop)
        return Server(size, observed, address, say, agents=remote.agents, silence_s=silence_s), observed
    history = History(say, table.name_of)
    opened = partial(tell_of_world, remote.agents, membership, history)
    observed = ObservedCoordinator(sessions, sessions.dead, watches, history, opened, told_stop)
    return Server(size, observed, address, say, agents=remote.agents, silence_s=silence_s), observed
