"""Add hosts to an elastic job and remove hosts from it while it runs.

The host table decides which hosts run ranks. This module carries out these decisions: it calls the agents, the control
server and the supervisor.
"""

from __future__ import annotations

import errno
import threading
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.job.host_table import CallHost, Dismiss, HostTable, Start, cooldown_range
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.hosts import index_of_this_host, is_this_host
from ddlcore.launch.ranks.revival import Revival
from ddlcore.messages.ranks import LaunchedRank, StartNumber
from ddlcore.text.ranks import ranks_text

if TYPE_CHECKING:
    from ddlcore.config.loading import Settings
    from ddlcore.control.server import Server
    from ddlcore.coordinator.membership import ElasticMembership
    from ddlcore.launch.agents.agent_pool import AgentPool
    from ddlcore.launch.agents.agent_record import Agent
    from ddlcore.launch.agents.remote_launch import RemoteLaunch
    from ddlcore.launch.job.placement import Placed
    from ddlcore.launch.ranks.supervisor import Supervisor, Watched

TICK_S = 1.0  # time between two queries of host discovery, and between two calls of ``HostTable.decide``
HandOver = Callable[[HostTable], None]
CALL_S = 60.0  # from the call of a host until its agent has reported; ssh may wait for ever for a shell on a sick host


def no_successor(_table: HostTable) -> None:
    """Tell nobody, because the job ends with its launcher."""


def host_table_of(placed: Placed, settings: Settings) -> HostTable | None:
    """Return the hosts of the job described by ``placed``, and which rank runs where; None if it is not elastic."""
    if not settings.whole("min_np"):
        return None
    layout, whole = placed.layout, placed.remote_plan is not None and placed.remote_plan.provider.whole
    hosts = placed.hosts or (HostSlots(layout.hosts[0], layout.size),)
    here = -1 if whole else layout.here
    if here < 0 and not whole:
        here = next((index for index, one in enumerate(hosts) if is_this_host(one.host, resolve=True)), -1)
    most = max(layout.size, placed.most)
    return HostTable(hosts, layout.ranks, placed.places, most, cooldown_range(settings.text("host_cooldown_s")), here)


def growth_of(
    table: HostTable | None,
    settings: Settings,
    membership: ElasticMembership | None,
    begin_here: BeginHere,
    server: Server,
    remote: RemoteLaunch | None,
    say: Callable[[str], None],
    hand_over: HandOver = no_successor,
) -> Growth | None:
    """Return the object that changes the hosts and processes of an elastic job.

    Return None if ``table`` and ``membership`` are None, because the job is not elastic.
    ``begin_here`` starts another process of a rank on this host. ``remote`` is None if the job has no agents. ``say``
    shows a line to the user. ``hand_over``: see Growth.
    """
    if table is None or membership is None:
        return None
    revival = revival_of(table, membership, settings)
    call_s = max(CALL_S, settings.number("start_timeout_s"))
    return Growth(table, revival, begin_here, server, remote, say, hand_over, call_s)


def revival_of(table: HostTable, membership: ElasticMembership, settings: Settings) -> Revival:
    """Return the rules by which processes of an elastic job are started again on the hosts of ``table``."""
    return Revival(
        settings.whole("restarts"),
        settings.number("restart_delay_s"),
        lambda rank: table.hosts[table.host_of(rank)].reached,
        lambda: membership.over,
        lambda: membership.complete,
        lambda: (membership.world.generation, membership.world.members),
    )


class Remote(Protocol):
    """The part of a remote launch that an elastic job needs while it runs."""

    @property
    def calls_hosts(self) -> bool:
        """Whether agents can still be started."""

    @property
    def agents(self) -> AgentPool: ...

    def own_variables(self, rank: LaunchedRank, host: str, hosts: Sequence[int]) -> dict[str, str]:
        """Return the variables of its own of a process that is started at ``rank`` on ``host`` while others train."""

    def call_late(self, host: str) -> None:
        """Start the agent of ``host``. Raises OSError or ValueError if there is no way."""

    def take_in(self, member: Agent, slots: int) -> tuple[str, ...]:
        """Tell an agent that was called late what it needs. Returns the problems for which it cannot take part."""


class BeginHere(Protocol):
    """A function that starts another process of a rank on the host of the launching process."""

    def __call__(self, rank: LaunchedRank, hosts: Sequence[int]) -> Watched:
        """Start a process of ``rank`` on this host, and return the object by which a supervisor watches the process.

        ``hosts[r]`` is the host index of rank r, or -1 if rank r was not started yet. Raises OSError if the process
        cannot be started.
        """


class Growth:
    """The hosts and processes of one elastic job, from the start of its first ranks to the end of the job.

    This is also the ``RestartPolicy`` that tells the supervisor whether a rank that has ended is started again. The
    supervisor's thread calls the methods, unless a method says that any thread may call it.
    """

    def __init__(
        self,
        table: HostTable,
        revival: Revival,
        begin_here: BeginHere,
        server: Server,
        remote: Remote | None,
        say: Callable[[str], None],
        hand_over: HandOver = no_successor,
        call_s: float = CALL_S,
        starts: Mapping[LaunchedRank, StartNumber] = types.MappingProxyType({}),
    ) -> None:
        """Begin with the ranks that were started at the start of the job.

        ``begin_here`` starts processes on the host ``table.here``. ``hand_over`` tells agents what a successor of the
        launcher needs, if that has changed; it is called at least once a second. An agent that has not reported
        ``call_s`` seconds after its call is given up. ``starts`` has the number of processes that each rank had before
        its present or last one, if not 0.
        """
        self._hand_over = hand_over
        self._starts = dict(starts)
        self._call_s = call_s
        self._table = table
        self._revival = revival
        self._begin_here = begin_here
        self._server = server
        self._remote = remote
        self._say = say
        self._supervisor: Supervisor | None = None
        self._closing = threading.Event()
        self._has_erred = False  # whether a process has failed by itself
        self._failed: set[str] = set()  # errors of host discovery that were already shown to the user

    def attach(self, supervisor: Supervisor, discovery: HostDiscovery | None) -> None:
        """Begin to ask ``discovery`` for hosts, and to carry out the decisions of the host table.

        ``discovery`` is None if no host will be added. A new thread asks ``discovery`` once a second, or whenever the last
        answer has come. The thread of ``supervisor`` carries out all decisions. Call this before the supervisor runs.
        """
        self._supervisor = supervisor
        if self._remote is not None:
            agents = self._remote.agents
            agents.changed = lambda member: supervisor.do(lambda: self._agent_changed(member))
            agents.leaves = lambda member: supervisor.do(lambda: self._leaves(member))
            for member in list(agents.members):
                if member.gone:
                    self._agent_changed(member)
                elif member.wants_to_leave:
                    self._leaves(member)
        threading.Thread(target=self._tick, args=(supervisor,), name="ddl-tick", daemon=True).start()
        if discovery is not None:
            threading.Thread(target=self._look, args=(supervisor, discovery), name="ddl-hosts", daemon=True).start()

    def close(self) -> None:
        """Stop asking for hosts, because the ranks have ended."""
        self._closing.set()

    def host_name(self, rank: int) -> str:
        """Return the name of the host on which the most recent process of ``rank`` was started.

        Return "" if no process of ``rank`` was started. Any thread may call this.
        """
        return self._table.name_of(LaunchedRank(rank))

    # --- what the supervisor asks

    def begin(self, rank: LaunchedRank) -> Watched:
        """Start another process of ``rank`` on the host that the host table has chosen.

        Return the object by which the supervisor watches the process. Raises OSError if the process cannot be started.
        """
        host = self._table.host_of(rank)
        if self._table.is_leaving(rank):  # since the decision to start it
            raise OSError(errno.EHOSTDOWN, "its host leaves the job", self._table.name_of(rank))
        self._starts[rank] = StartNumber(self._starts.get(rank, 0) + 1)
        self._server.rank_started(rank, host)  # before the process can say anything
        if host == self._table.here:
            if self._remote is not None:
                self._remote.agents.ranks.forget(rank)
            return self._begin_here(rank, self._hosts(rank))
        assert self._remote is not None
        name = self._table.name_of(rank)
        variables = self._remote.own_variables(rank, name, self._hosts(rank))
        return self._remote.agents.ranks.again(name, rank, variables, self._starts[rank])

    def delay_s(self, end: End) -> float | None:
        """Return the time in seconds after which the supervisor starts the ended rank again on the same host.

        ``end`` is the end of the rank. Return None if the supervisor does not start the rank again on this host. In
        this case, record the end in the host table, which may start the rank on another host later.
        """
        delay_s = self._revival.delay_s(end)
        self._has_erred = self._has_erred or (end.failed and not end.lost)
        if self._table.is_leaving(end.rank):
            self._table.ended(end.rank, not end.failed)
            return None
        if delay_s is None:
            if end.failed and self._table.hosts[self._table.host_of(end.rank)].reached:
                self._table.failed(end.rank, time.monotonic())
            else:
                self._table.ended(end.rank, not end.failed)
        return delay_s

    def otherwise(self, end: End) -> str:
        """Return words for the user that say what happens after ``end``, for which ``delay_s`` has returned None."""
        host = self._table.hosts[self._table.host_of(end.rank)]
        left_s = host.blocked_until_s - time.monotonic()
        if self._revival.over:
            return self._revival.otherwise(end)
        if not host.reached or not host.slots:
            return "it is started again when a host has room for it"
        return f"its host is left out for {left_s:.0f} s" if left_s > 0 else self._revival.otherwise(end)

    @property
    def over(self) -> bool:
        """Whether no rank needs to be started any more, because the training is complete or the job cannot go on."""
        return self._revival.over

    def has_failed(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the job cannot go on, and none of the ranks in ``running`` has been in its last world."""
        return self._revival.has_failed(running)

    @property
    def expects(self) -> bool:
        """Whether the ranks were lost with their hosts before the training began, and another host is being called."""
        if self._revival.over or self._revival.has_begun or self._has_erred:
            return False
        return any(host.calling for host in self._table.hosts)

    def is_done(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the training is complete and needs no rank in ``running``, the ranks that still run."""
        return self._revival.is_done(running)

    def relevant(self) -> list[End]:
        """Return the ends of processes that determine the job's exit code, at most one for each rank.

        See ``Revival.relevant``.
        """
        return self._revival.relevant()

    # --- what happens to hosts

    def found(self, entries: Sequence[HostSlots]) -> None:
        """Give ``entries``, all hosts that host discovery has found now, to the host table.

        Then carry out the decisions of the host table.
        """
        known = {host.name for host in self._table.hosts}
        named = []
        for one in entries:
            if one.host not in known and is_this_host(one.host, resolve=True):
                if self._table.here >= 0:  # this host has another name in the host table
                    one = HostSlots(self._table.hosts[self._table.here].name, one.slots)
                else:
                    self._table.here = len(self._table.hosts)
            named.append(one)
        self._table.found(named)
        if 0 <= self._table.here < len(self._table.hosts):
            self._table.hosts[self._table.here].reached = True
        self._act()

    def _agent_changed(self, member: Agent) -> None:
        name = member.place.host
        index = next((index for index, host in enumerate(self._table.hosts) if host.name == name), -1)
        if index < 0 or self._remote is None:
            return
        if not member.gone:
            problems = self._remote.take_in(member, max(1, self._table.hosts[index].slots))
            if not problems:
                self._table.reached(index)
                self._act()
                return
            self._say(f"{name} cannot take part: {'; '.join(problems)}")
        elif self._table.hosts[index].calling:
            self._say(f"{name} cannot take part: {member.gone.removeprefix(f'{name}: ')}")
        self._table.lost(index, time.monotonic())
        if not self._remote.calls_hosts:
            self._table.leaves(index)
        self._act()

    def _leaves(self, member: Agent) -> None:
        for index, host in enumerate(self._table.hosts):
            if host.name == member.place.host:
                self._table.leaves(index)
        self._act()

    def _act(self) -> None:
        """Carry out the decisions that the host table makes now: start agents and ranks, and dismiss ranks."""
        if self._revival.over:
            return
        self._hand_over(self._table)
        now_s = time.monotonic()
        for host in self._table.called_before(now_s - self._call_s):
            assert self._remote is not None
            self._remote.agents.lose(self._table.hosts[host].name, f"it has not answered within {self._call_s:g} s")
        for decision in self._table.decide(now_s):
            if isinstance(decision, Dismiss):
                self._say(f"{decision.reason}: {ranks_text(decision.places)} will leave the training")
                self._server.dismiss_ranks(decision.places, decision.reason)
            elif isinstance(decision, Start):
                self._say(f"rank {decision.place} is started on {self._table.hosts[decision.host].name}")
                assert self._supervisor is not None
                self._supervisor.start(decision.place)
            elif isinstance(decision, CallHost):
                self._call(decision.host)

    def _call(self, host: int) -> None:
        name = self._table.hosts[host].name
        try:
            if self._remote is None:
                raise ValueError("this job has no agents")
            self._remote.call_late(name)
        except (OSError, ValueError) as error:
            self._say(f"{name} cannot take part: no agent can be started: {error}")
            self._table.lost(host, time.monotonic())

    def _hosts(self, rank: LaunchedRank) -> list[int]:
        """Return the host index of each rank, in rank order. It is -1 for a rank that was never started.

        The last rank in the list is ``rank`` or the highest rank that was ever started, whichever is higher.
        """
        hosts = [self._table.host_of(one) for one in map(LaunchedRank, range(self._table.places))]
        last = max(one for one, host in enumerate(hosts) if host >= 0 or one == rank)
        return hosts[: last + 1]

    # --- threads: host discovery is code of others, and may take any time for an answer

    def _tick(self, supervisor: Supervisor) -> None:
        while not self._closing.wait(TICK_S):
            supervisor.do(self._act)

    def _look(self, supervisor: Supervisor, discovery: HostDiscovery) -> None:
        before: Sequence[HostSlots] | None = None
        while not self._closing.wait(TICK_S):
            now = self._discover(discovery, before)
            if now is not None and now != before:
                before = now
                supervisor.do(lambda entries=now: self.found(entries))  # type: ignore[misc]

    def _discover(self, discovery: HostDiscovery, before: Sequence[HostSlots] | None) -> Sequence[HostSlots] | None:
        try:
            now = tuple(discovery.hosts())
            if now != before:
                index_of_this_host(now, "the list of hosts", resolve=True)  # refuses two names of this host
            return now
        except Exception as error:  # host discovery is code of others, and its failure must not end a training
            text = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            if text not in self._failed:
                self._failed.add(text)
                self._say(f"host discovery: {text}; the hosts stay as they were")
            return None
