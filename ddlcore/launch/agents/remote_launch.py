"""Launch ranks on other hosts: start the agents of a remote plan, check the hosts, and let the agents start ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ddlcore.config.loading import Settings
from ddlcore.contracts.launcher import AgentPlace
from ddlcore.control.credentials import KeyPair
from ddlcore.control.ports import free_ports
from ddlcore.control.server import Server
from ddlcore.launch.agents.agent_pool import AgentPool, Unheard
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.preflight import HostCheck, compared_packages, judge
from ddlcore.launch.agents.preflight import show as table_of
from ddlcore.launch.agents.remote_plan import RemotePlan, route_for
from ddlcore.launch.agents.wire import CHUNK_BYTES, Begin, Credit, Handover, Heir, Look, RankTask
from ddlcore.launch.ranks.command import may_run_python
from ddlcore.launch.ranks.environment import (
    HostFacts,
    RankVariables,
    carried,
    late_environment,
    own_environments,
    setting_variables,
    shared_environment,
    thread_variables,
    usable_cores,
)
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.launch.ranks.warmup import machine_code_of
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Registry
from ddlcore.types import Placement

_BEGIN_S = 30.0  # how long agents may take to start their ranks
_COMPILE_S = 300.0  # added if an agent first compiles the CPU kernels


def goes_on_without_launcher(settings: Settings, command: Sequence[str]) -> bool:
    """Return whether agents of a job that runs ``command`` go on when their launcher is lost.

    Nobody could return the results of a function (``command`` is empty then), so its job ends.
    """
    return bool(settings.whole("min_np") and command and settings.text("launcher_loss") == "continue")


@dataclass
class _SharedTask:
    """The command, the settings and the other values that are the same for all ranks of one job."""

    command: Sequence[str]  # (): the ranks call a function instead
    environ: Mapping[str, str]
    settings: Settings
    gives_input: bool
    timeline: bool


@dataclass
class RemoteLaunch:
    """The part of a job's launch that uses agents. Only the main thread may use this object."""

    remote_plan: RemotePlan
    registry: Registry
    say: Callable[[str], None]
    unheard: Unheard | None = None  # see AgentPool
    agents: AgentPool = field(init=False)
    calls_hosts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.agents = AgentPool(self.remote_plan.places, self.remote_plan.launcher, self.say, self.unheard)
        self._owns: list[dict[str, str]] = []
        self._facts: dict[str, HostFacts] = {}  # by name of the host
        self._shared: _SharedTask | None = None
        self._own: set[str] = set()
        self._descriptors: set[str] = set()
        self._successor_keys = KeyPair()  # with which agents connect to a successor of this launcher

    # --- before

    def look(self, program: str, files: Sequence[str], port: int) -> Look:
        """Return the message that asks every agent to report on its host.

        The report says whether ``program`` and ``files`` exist on the host, among other things. ``port`` is the value
        of MASTER_PORT if the user has set this variable, otherwise 0.
        """
        most = max(self.remote_plan.layout.ranks.count(host) for host in set(self.remote_plan.layout.ranks))
        return Look(
            directory=self.remote_plan.directory,
            files=tuple(files),
            program=program,
            packages=tuple(compared_packages(self.registry)),
            network_interface=self.remote_plan.settings.text("network_interface"),
            ports=2 * most + 2,  # agents of one host choose independently, and may choose the same ports
            port=port,
        )

    def prepare(
        self,
        server: Server,
        look: Look,
        interrupted: Callable[[], object],
        show: Callable[[str], None],
        verbose: bool = False,
        on_terminal: bool = False,
    ) -> None:
        """Start the agents, and check all hosts by the reports of the agents. ``server`` must be running.

        Raises NotStarted if a host cannot take part. If there is only one problem, the exception's message describes
        it. If there are several problems, ``show`` is first called with each line of a table of all hosts; ``verbose``
        shows the table in every case, with colours if ``on_terminal`` is true. Differences between hosts that do not
        stop the job are only shown. If ``interrupted()`` becomes true during the wait for the reports, returns without
        checking the hosts.
        """
        try:
            self._call(server, look)
        except FileNotFoundError as error:
            raise NotStarted(f"no agent can be started: there is no program {error.filename} here") from None
        except (OSError, ValueError) as error:
            raise NotStarted(f"no agent can be started: {error}") from None
        if not self.agents.gather(self.remote_plan.settings.number("start_timeout_s"), interrupted):
            return
        checks = self._checks()
        wrong = [check for check in checks if check.problems]
        why = {check.host: check.problems for check in wrong}
        if len(wrong) == 1 and len(wrong[0].problems) == 1 and not verbose:
            raise NotStarted(f"nothing was started: {wrong[0].host}: {wrong[0].problems[0]}", hosts=why)
        if wrong or verbose:
            for line in table_of(checks, on_terminal=on_terminal):
                show(line)
        if wrong:
            hosts = ", ".join(check.host for check in wrong)
            raise NotStarted(f"nothing was started: {hosts} cannot take part", hosts=why)
        for check in checks:
            if check.remarks and not verbose:
                show(f"{check.host}: {'; '.join(check.remarks)}")

    def _call(self, server: Server, look: Look) -> None:
        """Start the agents, which connect to ``server``.

        ``look`` is the request for their reports. Raises OSError or ValueError if the agents cannot be started.
        """
        endpoint_of = self.remote_plan.reach.endpoint_of(server.agents_endpoint)
        self._server, self._endpoint_of = server, endpoint_of
        places = self.remote_plan.places
        commands = self.remote_plan.commands(server.agent_access(endpoint_of(places[0].host))) if places else ()
        settings = self.remote_plan.settings
        self.agents.call(commands, server, endpoint_of, self.remote_plan.environ, settings.number("silence_s"), look)
        self._own = {prefix for command in commands for prefix in command.own}
        self._descriptors = {name for command in commands for name in command.descriptors}

    def _checks(self) -> list[HostCheck]:
        """Return the result of checking each host, in the order of the hosts.

        For a host with several agents, return the result of only one agent: one with problems, if there is such a
        result.
        """
        packages = compared_packages(self.registry)
        found: dict[str, HostCheck] = {}
        for member in self.agents.members:
            check = judge(member.place.host, member.report, member.gone, packages)
            if member.place.host not in found or check.problems:
                found[member.place.host] = check
        return list(found.values())

    # --- the beginning

    def environments(self, job_file: str, port: int, timeline_dir: str = "") -> list[dict[str, str]]:
        """Return, for each rank of the job, the environment variables that differ between ranks.

        ``job_file`` and ``timeline_dir`` are paths for the ranks of this host. ``port`` is the value of MASTER_PORT; 0
        means a free port of rank 0's host. Call this method after all agents have sent their reports.
        """
        layout = self.remote_plan.layout
        names = {name: host for host, name in enumerate(layout.hosts)}
        facts = [
            HostFacts(
                job_file, self.remote_plan.reach.own, (), usable_cores(), self.remote_plan.provider.name, timeline_dir
            )
            if host == layout.here
            else HostFacts()
            for host in range(len(layout.hosts))
        ]
        for member in self.agents.members:
            host, report = names[member.place.host], member.report
            assert report is not None
            ports = tuple(dict.fromkeys((*facts[host].ports, *report.ports)))
            facts[host] = HostFacts("", report.address, ports, report.cores, self.remote_plan.provider.name)
        first = layout.ranks[0]
        spare = facts[first].ports[-1:] or tuple(free_ports(1))
        self._facts = dict(zip(layout.hosts, facts, strict=True))
        self._port = port or spare[0]
        self._owns = own_environments(
            layout.ranks,
            facts,
            self._port,
            RankVariables.of(self.remote_plan.settings),
            self.remote_plan.settings.whole("min_np") > 0,
        )
        return self._owns

    def begin(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        settings: Settings,
        interrupted: Callable[[], object],
        gives_input: bool = False,
        timeline_dir: Path | None = None,
    ) -> list[str]:
        """Tell all agents to start their ranks, and wait until all agents have done so.

        Return one line of text for each agent that has not started its ranks. If ``command`` is empty, the ranks call
        the function that was sent to the agents before. ``environ`` is the environment of the ranks. ``gives_input``
        says whether rank 0 gets this process's stdin. ``timeline_dir`` is the directory for the ranks' parts of a
        timeline; None means that the agents send no parts. The wait ends early if ``interrupted()`` becomes true.
        """
        self._shared = job = _SharedTask(command, environ, settings, gives_input, timeline_dir is not None)
        self.agents.streams.timeline_dir = timeline_dir
        begins = [
            self._begin(member.place.host, member.ranks, job, len(member.place.ranks)) for member in self.agents.members
        ]
        patience_s = _BEGIN_S + _COMPILE_S * any(one.machine_code for one in begins)
        problems = self.agents.begin(begins, patience_s, interrupted)
        if not problems and any(one.stdin_rank >= 0 for one in begins):
            credit = next(member.credit for member in self.agents.members if 0 in member.ranks)
            threading.Thread(target=_feed, args=(credit,), name="ddl-feed", daemon=True).start()
        return problems

    # --- later

    def call_late(self, host: str) -> None:
        """Start an agent on ``host`` while ranks are already running, so that ``host`` can run ranks later.

        Raises OSError or ValueError if the agent cannot be started.
        """
        members, reach = self.agents.members, self.remote_plan.reach
        known = self.remote_plan.launcher.address(host, self.remote_plan.environ)
        reach.routes.setdefault(host, route_for(self.remote_plan.settings, reach, known))
        place = AgentPlace(len(members), host, ())
        access = self._server.agent_access(self._endpoint_of(host))
        command = self.remote_plan.late_command(place, [member.place for member in members], access)
        self._own |= set(command.own)
        self._descriptors |= set(command.descriptors)
        self.agents.call_late(place, command)

    def take_in(self, member: Agent, slots: int) -> tuple[str, ...]:
        """Check the host of ``member``, an agent started by ``call_late`` that has sent its report.

        If there is no problem, send the agent the data that it needs to start up to ``slots`` ranks, and return (). If
        the host cannot take part, end the agent and return one line of text for each problem.
        """
        assert member.report is not None and self._shared is not None
        check = judge(member.place.host, member.report, member.gone, compared_packages(self.registry))
        if check.problems:
            self.agents.dismiss(member)
            return tuple(check.problems)
        name, report = self.remote_plan.provider.name, member.report
        self._facts[member.place.host] = HostFacts("", report.address, report.ports, report.cores, name)
        self.agents.begin_late(member, self._begin(member.place.host, (), self._shared, slots))
        return ()

    def own_variables(self, rank: LaunchedRank, host: str, hosts: Sequence[int]) -> dict[str, str]:
        """Return the environment variables that only ``rank`` gets, for a process that starts while other ranks train.

        ``host`` is the name of the host of the new process. ``hosts[r]`` is the host index of rank r, or -1 if rank r
        was not started yet.
        """
        told = RankVariables.of(self.remote_plan.settings)
        first = self._facts[self.remote_plan.layout.hosts[self.remote_plan.layout.ranks[0]]]
        return late_environment(Placement(rank, tuple(hosts)), self._facts[host], first.address, self._port, told)

    def handover(self, hosts: Sequence[tuple[str, int]], places: int, most: int, directory: Path) -> Handover:
        """Return what a successor of this launcher needs, as things are now.

        ``hosts`` are all hosts by their index, with their slots. There are ``places`` numbers of ranks, and ``most`` ranks
        at the same time. ``directory`` is where the successor writes the output.
        """
        assert self._shared is not None
        heirs = []
        for member in self.agents.members:
            begun, facts = member.begun, self._facts.get(member.place.host)
            if begun is not None and not member.over and facts is not None:
                ports = tuple(int(port) for port in facts.ports)
                where = (member.place.index, member.place.host, begun.endpoint, begun.server_public)
                heirs.append(Heir(*where, ports, facts.address, facts.cores))
        ours = {name: value for name, value in carried(self._shared.environ).items() if name.startswith("DDL_")}
        return Handover(
            heirs=tuple(heirs),
            client_public=self._successor_keys.public,
            client_secret=self._successor_keys.secret,
            variables={**ours, **setting_variables(self._shared.settings)},
            hosts=tuple(hosts),
            places=places,
            most=most,
            launcher=self.remote_plan.provider.name,
            master=(
                self._facts[self.remote_plan.layout.hosts[self.remote_plan.layout.ranks[0]]].address,
                int(self._port),
            ),
            directory=str(directory),
        )

    def _begin(self, name: str, ranks: Sequence[LaunchedRank], job: _SharedTask, slots: int) -> Begin:
        layout = self.remote_plan.layout
        host = layout.hosts.index(name) if name in layout.hosts else len(layout.hosts)
        threads = thread_variables(job.environ, self._facts[name].cores, max(1, slots))
        may_train = not job.command or may_run_python(job.command)
        compiles = host != layout.here and layout.size + (not ranks) > 1 and may_train
        added = {**threads, **setting_variables(job.settings)}
        shared = shared_environment(carried(job.environ), added, bool(job.settings["torch_env"]))
        return Begin(
            command=tuple(job.command),
            environ=shared,
            own=tuple(sorted(self._own)),
            descriptors=tuple(sorted(self._descriptors)),
            ranks=tuple(RankTask(rank, self._owns[rank]) for rank in ranks),
            stdin_rank=0 if job.gives_input and 0 in ranks else -1,
            machine_code=machine_code_of(self.registry) if compiles else (),
            cache_dir=job.settings.text("cache_dir"),
            stays=job.settings.whole("min_np") > 0,
            succession=goes_on_without_launcher(job.settings, job.command),
            timeline=job.timeline,
        )


def _feed(credit: Credit) -> None:
    """Send this process's standard input to rank 0, which an agent runs.

    ``credit`` limits the number of bytes that are sent before the agent has acknowledged earlier bytes.
    """
    more = True
    while more:
        try:
            data = os.read(0, CHUNK_BYTES)
        except OSError:
            data = b""
        more = credit.send(0, "stdin", data) and bool(data)
