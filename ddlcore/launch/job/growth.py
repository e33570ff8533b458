"""Lets an elastic job change its hosts: carries out what the host table decides, by agents, server and supervisor."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.job.host_table import Call, Dismiss, HostTable, Start, cooldown_range
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.hosts import is_this_host
from ddlcore.launch.ranks.revival import Revival
from ddlcore.text.ranks import ranks_text

if TYPE_CHECKING:
    from ddlcore.config import Settings
    from ddlcore.control.server import Server
    from ddlcore.coordinator.membership import Membership
    from ddlcore.launch.agents.agent_pool import Agent, AgentPool
    from ddlcore.launch.agents.remote_launch import RemoteLaunch
    from ddlcore.launch.job.placement import Placed
    from ddlcore.launch.output.output import Output
    from ddlcore.launch.ranks.supervisor import Supervisor, Watched
    from ddlcore.plug.registry import Registry

TICK_S = 1.0  # how often is asked which hosts there are, and whether a host has been left out for long enough


def growth_of(
    placed: Placed,
    settings: Settings,
    membership: Membership,
    begin_here: BeginHere,
    server: Server,
    remote: RemoteLaunch | None,
    output: Output,
    registry: Registry,
    say: Callable[[str], None],
) -> Growth:
    """Return the object that lets the hosts and processes of the elastic job ``placed`` change."""
    layout, whole = placed.layout, placed.remote_plan is not None and placed.remote_plan.provider.whole
    hosts = placed.hosts or (HostSlots(layout.hosts[0], layout.size),)
    here = -1 if whole else layout.here
    if here < 0 and not whole:
        here = next((index for index, one in enumerate(hosts) if is_this_host(one.host, resolve=True)), -1)
    most = max(layout.size, placed.most)
    cooldown_s = cooldown_range(settings.text("host_cooldown_s"))
    table = HostTable(hosts, layout.ranks, placed.places, most, cooldown_s, here)
    revival = revival_of(table, membership, settings)
    return Growth(table, revival, here, begin_here, server, remote, output, registry, say)


def revival_of(table: HostTable, membership: Membership, settings: Settings) -> Revival:
    """Return the rules by which processes of an elastic job are started again on the hosts of ``table``."""
    return Revival(
        settings.whole("restarts"),
        settings.number("restart_delay_s"),
        lambda rank: table.hosts[table.host_of(rank)].reached,
        lambda: membership.over,
        lambda: membership.complete,
        lambda: (membership.generation, membership.members),
    )


class Remote(Protocol):
    """The part of a remote launch that an elastic job needs while it runs."""

    @property
    def agents(self) -> AgentPool: ...

    def own_variables(self, rank: int, host: str, hosts: Sequence[int]) -> dict[str, str]:
        """Return the variables of its own of a process that is started at ``rank`` on ``host`` while others train."""

    def call_late(self, host: str) -> None:
        """Start the agent of ``host``. Raises OSError or ValueError if there is no way."""

    def take_in(self, member: Agent, registry: Registry, slots: int) -> tuple[str, ...]:
        """Tell an agent that was called late what it needs. Returns the problems for which it cannot take part."""


class BeginHere(Protocol):
    """Starts another process of a rank on the launching process's own host."""

    def __call__(self, rank: int, hosts: Sequence[int]) -> Watched:
        """Start it and return it. ``hosts``: the host index of each rank so far. Raises OSError if that fails."""


class Growth:
    """The hosts and processes of one elastic job, from the start of its first ranks to its end.

    The supervisor asks it what follows from the end of a rank, as it asks a ``Revival``. Unless something else is said,
    the supervisor's thread calls the methods.
    """

    def __init__(
        self,
        table: HostTable,
        revival: Revival,
        here: int,
        begin_here: BeginHere,
        server: Server,
        remote: Remote | None,
        output: Output,
        registry: Registry,
        say: Callable[[str], None],
        starts: Mapping[int, int] = types.MappingProxyType({}),
    ) -> None:
        """Begin with the ranks that were started at first.

        ``here`` is the index in ``table`` of the host whose processes ``begin_here`` starts; -1 means that there is no
        such host. ``starts`` has the number of processes that each rank had before its present or last one, if not 0.
        """
        self.hand_over: Callable[[HostTable], None] = lambda table: None  # called once a second
        self._starts = dict(starts)
        self._table = table
        self._revival = revival
        self._here = here
        self._begin_here = begin_here
        self._server = server
        self._remote = remote
        self._output = output
        self._registry = registry
        self._say = say
        self._supervisor: Supervisor | None = None
        self._closing = threading.Event()
        self._failed: set[str] = set()  # what was said about discovery

    def attach(self, supervisor: Supervisor, discovery: HostDiscovery | None) -> None:
        """Begin to look for hosts, by ``discovery`` if there is one, and act in the thread of ``supervisor``."""
        self._supervisor = supervisor
        if self._remote is not None:
            agents = self._remote.agents
            agents.changed = lambda member: supervisor.do(lambda: self._agent_changed(member))
            agents.leaves = lambda member: supervisor.do(lambda: self._leaves(member))
            for member in [member for member in agents.members if member.gone]:
                self._agent_changed(member)
        threading.Thread(target=self._look, args=(supervisor, discovery), name="ddl-hosts", daemon=True).start()

    def close(self) -> None:
        """Stop looking for hosts, because the ranks have ended."""
        self._closing.set()

    def host_name(self, rank: int) -> str:
        """Return the name of the host of the last process of ``rank``. Any thread may call this."""
        return self._table.name_of(rank)

    # --- what the supervisor asks

    def begin(self, rank: int) -> Watched:
        """Start another process of ``rank`` where the table says. Raises OSError if that fails."""
        host = self._table.host_of(rank)
        self._starts[rank] = self._starts.get(rank, 0) + 1
        self._server.rank_started(rank, host)  # before the process can say anything
        if host == self._here:
            if self._remote is not None:
                self._remote.agents.forget(rank)
            return self._begin_here(rank, self._hosts(rank))
        assert self._remote is not None
        name = self._table.name_of(rank)
        variables = self._remote.own_variables(rank, name, self._hosts(rank))
        return self._remote.agents.again(name, rank, variables, self._output, self._starts[rank])

    def delay_s(self, end: End) -> float | None:
        """Return after how many seconds the supervisor starts the rank that has ended again, where it was.

        Returns None if it does not start it again.
        """
        delay_s = self._revival.delay_s(end)
        if delay_s is None:
            if end.failed and self._table.hosts[self._table.host_of(end.rank)].reached and not end.lost:
                self._table.failed(end.rank, time.monotonic())
            else:
                self._table.ended(end.rank, not end.failed)
        return delay_s

    def otherwise(self, end: End) -> str:
        """Return, for the user, what follows from ``end`` after ``delay_s`` has returned None."""
        if end.lost and not self._revival.over:
            return "it is started again when a host has room for it"
        left_s = self._table.hosts[self._table.host_of(end.rank)].blocked_until_s - time.monotonic()
        if self._revival.over or left_s <= 0:
            return self._revival.otherwise(end)
        return f"its host is left out for {left_s:.0f} s"

    @property
    def over(self) -> bool:
        """Whether no rank has to be started any more, because the training is complete or the job cannot go on."""
        return self._revival.over

    def is_done(self, running: Collection[int]) -> bool:
        """Return whether the processes that are ``running`` are not needed any more.

        That is so when the training is complete without them.
        """
        return self._revival.is_done(running)

    def relevant(self) -> list[End]:
        """Return the ends that decide how the job has ended, at most one for each rank."""
        return self._revival.relevant()

    # --- what happens to hosts

    def found(self, entries: Sequence[HostSlots]) -> None:
        """Take the hosts that host discovery has found now."""
        known = {host.name for host in self._table.hosts}
        named = []
        for one in entries:
            if one.host not in known and is_this_host(one.host, resolve=True):
                if self._here >= 0:  # listed under another name
                    one = HostSlots(self._table.hosts[self._here].name, one.slots)
                else:
                    self._here = len(self._table.hosts)
            named.append(one)
        self._table.found(named)
        if 0 <= self._here < len(self._table.hosts):
            self._table.hosts[self._here].reached = True
        self._act()

    def _agent_changed(self, member: Agent) -> None:
        name = member.place.host
        index = next((index for index, host in enumerate(self._table.hosts) if host.name == name), -1)
        if index < 0 or self._remote is None:
            return
        if not member.gone:
            problems = self._remote.take_in(member, self._registry, max(1, self._table.hosts[index].slots))
            if not problems:
                self._table.reached(index)
                self._act()
                return
            self._say(f"{name} cannot take part: {'; '.join(problems)}")
        elif self._table.hosts[index].calling:
            self._say(f"{name} cannot take part: {member.gone.removeprefix(f'{name}: ')}")
        self._table.lost(index, time.monotonic())
        self._act()

    def _leaves(self, member: Agent) -> None:
        for index, host in enumerate(self._table.hosts):
            if host.name == member.place.host:
                self._table.leaves(index)
        self._act()

    def _act(self) -> None:
        """Carry out what the table decides now."""
        if self._revival.over:
            return
        self.hand_over(self._table)
        for decision in self._table.decide(time.monotonic()):
            if isinstance(decision, Dismiss):
                self._say(f"{decision.reason}: {ranks_text(decision.places)} will leave the training")
                self._server.dismiss_ranks(decision.places, decision.reason)
            elif isinstance(decision, Start):
                self._say(f"rank {decision.place} is started on {self._table.hosts[decision.host].name}")
                assert self._supervisor is not None
                self._supervisor.start(decision.place)
            elif isinstance(decision, Call):
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

    def _hosts(self, rank: int) -> list[int]:
        """Return the host index of each rank up to the last one, and at least up to ``rank``."""
        hosts = [self._table.host_of(one) for one in range(self._table.places)]
        last = max(one for one, host in enumerate(hosts) if host >= 0 or one == rank)
        return hosts[: last + 1]

    # --- the thread that looks

    def _look(self, supervisor: Supervisor, discovery: HostDiscovery | None) -> None:
        before: Sequence[HostSlots] | None = None
        while not self._closing.wait(TICK_S):
            now = before if discovery is None else self._discover(discovery)
            if now is not None and now != before:
                before = now
                supervisor.do(lambda entries=now: self.found(entries))  # type: ignore[misc]
            else:
                supervisor.do(self._act)

    def _discover(self, discovery: HostDiscovery) -> Sequence[HostSlots] | None:
        try:
            return tuple(discovery.hosts())
        except Exception as error:  # it is foreign code, and a training must not end because it fails
            text = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            if text not in self._failed:
                self._failed.add(text)
                self._say(f"host discovery: {text}; the hosts stay as they were")
            return None
