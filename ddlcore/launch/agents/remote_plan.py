"""Plan a job in which agents start ranks: choose the agents, the launcher that starts them, and the addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddlcore.config.loading import Settings
from ddlcore.contracts.interfaces import chosen_address, interface_addresses, route_address
from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand, StartPlan
from ddlcore.control.credentials import Access
from ddlcore.control.ports import LOOPBACK
from ddlcore.hooks import LauncherProvider
from ddlcore.launch.agents.bootstrap import agent_program, public_arguments
from ddlcore.launch.agents.survey import endpoint_host
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Registry

_WILDCARDS = ("0.0.0.0", "::", "*")
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: the system uses its default route to them


def choose_launcher(
    wanted: str, needed: str, registry: Registry, environ: Mapping[str, str]
) -> tuple[LauncherProvider, Callable[[], Launcher]]:
    """Return the launcher that starts the agents: its entry in ``registry``, and a function that creates the launcher.

    ``wanted`` is the name that the user chose; an empty string and "auto" mean no choice. If the user chose none,
    ``needed`` is used: the name of the launcher that the transport needs, "" if the transport needs none. If both are
    empty, use the launcher with the highest priority among those launchers that can be used here and whose environment
    variables are set in ``environ``. Raises PluginError, with a message of one line, if the launcher is not installed
    or cannot be used.
    """
    name = needed if wanted in ("", "auto") else wanted
    if name:
        provider = registry.named(Registry.launchers, name)
    else:
        provider = max(
            (
                one
                for one in registry.launchers.values()
                if not one.optional and all(name in environ for name in one.variables) and not registry.missing(one)
            ),
            key=lambda one: one.priority,
        )
    return provider, registry.load(provider)


@dataclass(frozen=True)
class Reach:
    """The address at which the control server listens, and the addresses by which other hosts reach this host."""

    bind: str  # the argument of Listener.bind; "": all agents are on this host
    routes: dict[str, str]  # by name of another host: the address by which that host reaches this host
    otherwise: str = ""  # the address for hosts that are not known yet; "": no other hosts will be added

    def endpoint_of(self, bound: str) -> Callable[[str], str]:
        """Return a function that returns, for the name of a host, the endpoint to which agents on that host connect.

        ``bound`` is the endpoint at which the server listens, with the port that the system has chosen.
        """
        port = bound.rpartition(":")[2]
        # A command that starts agents on this host and on others gives all of them the same endpoint. This endpoint
        # must not be a wildcard address, because other hosts cannot connect to a wildcard address.
        otherwise = self.own if endpoint_host(bound) in _WILDCARDS else ""

        def endpoint(host: str) -> str:
            address = self.routes.get(host, otherwise)
            return f"tcp://{_bracketed(address)}:{port}" if address else bound

        return endpoint

    @property
    def own(self) -> str:
        """The address at which other hosts reach the ranks of this host, or "" if all ranks are on this host."""
        return next(iter(self.routes.values()), self.otherwise)


def find_reach(settings: Settings, hosts: Mapping[str, str], more: bool = False) -> Reach:
    """Decide at which address the control server listens, and by which addresses other hosts reach the server.

    ``hosts`` has the hosts, except this host, on which agents run. It maps the name of each host to the name or address
    by which the network knows the host. The setting ``control_address`` gives the address. If this setting is empty,
    use the address of the interface in the setting ``network_interface``. If both are empty, use this host's address on
    the route to each host. ``more`` means that hosts may be added later. Raises ValueError, with a message of one line,
    if no address is found.
    """
    if not hosts and not more:
        return Reach("", {})
    wanted, interface = settings.text("control_address"), settings.text("network_interface")
    if wanted and not endpoint_host(wanted):
        raise ValueError(f"--control-address {wanted}: other hosts connect by TCP; give it as tcp://IP:PORT")
    if wanted and endpoint_host(wanted) not in _WILDCARDS:
        return Reach(wanted, dict.fromkeys(hosts, endpoint_host(wanted)), endpoint_host(wanted))
    if endpoint_host(wanted) in ("0.0.0.0", "*"):  # these wildcards listen on IPv4 only
        hosts = {host: _by_ipv4(known) for host, known in hosts.items()}
    routes = _routes(hosts, interface) if hosts else {}
    distinct = set(routes.values())
    if more:
        otherwise = next(iter(routes.values()), "") or _any_address(interface)
        anywhere = "tcp://[::]:0" if any(":" in address for address in (*distinct, otherwise)) else "tcp://0.0.0.0:0"
        return Reach(wanted or anywhere, routes, otherwise)  # hosts that are added later use the same address family
    if wanted:
        return Reach(wanted, routes)
    if len(distinct) == 1:
        return Reach(f"tcp://{_bracketed(distinct.pop())}:0", routes)
    return Reach("tcp://[::]:0" if any(":" in address for address in distinct) else "tcp://0.0.0.0:0", routes)


def _any_address(interface: str) -> str:
    """Return an address of this host at which hosts that are not known yet can probably reach this host.

    If ``interface`` is not empty, return the address of this interface. Otherwise return the address on the default
    route. If there is no default route, return any IPv4 address that is not a loopback address, or else 127.0.0.1.
    """
    if interface:
        return chosen_address(interface, _ANYWHERE[0])
    with contextlib.suppress(ValueError):
        return route_address(_ANYWHERE[0])
    known = [address for addresses in interface_addresses().values() for address in addresses]
    return next((one for one in known if ":" not in one and not one.startswith("127.")), LOOPBACK)


def route_for(settings: Settings, reach: Reach, known: str) -> str:
    """Return the address by which a host that is added later reaches this host.

    ``known`` is the name or address by which the network knows the added host.
    """
    if endpoint_host(reach.bind) not in _WILDCARDS:
        return endpoint_host(reach.bind)
    toward = known if endpoint_host(reach.bind) == "::" else _by_ipv4(known)
    return _routes({known: toward}, settings.text("network_interface"))[known]


def _by_ipv4(host: str) -> str:
    """Return the first IPv4 address of ``host``, or ``host`` itself if no IPv4 address is found."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host


def _routes(hosts: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return, for the name of each host in ``hosts``, the address by which that host reaches this host.

    If ``interface`` is not empty, this is the address of the interface. Otherwise it is this host's address on the
    route to that host. Sometimes no route to a host is found, because only the remote shell knows the name of the host
    or because the host does not exist. Then use the first address that was found for another host or for the default
    route. Raises ValueError if no address at all is found.
    """
    if interface:
        return {host: chosen_address(interface, known) for host, known in hosts.items()}
    found: dict[str, str] = {}
    failure = ""
    for toward in (*hosts.values(), *_ANYWHERE):
        try:
            found[toward] = route_address(toward)
        except ValueError as error:
            failure = failure or str(error)
    if not found:
        raise ValueError(f"{failure}; set --network-interface or --control-address, so that hosts find this one")
    otherwise = next(iter(found.values()))
    return {host: found.get(known, otherwise) for host, known in hosts.items()}


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True)
class RemotePlan:
    """The plan of a job in which agents start ranks.

    The plan has the ranks with their hosts, the agents, the launcher that starts the agents, and the addresses by which
    the agents reach the control server.
    """

    layout: Layout
    provider: LauncherProvider
    launcher: Launcher
    places: tuple[AgentPlace, ...]
    reach: Reach
    environ: Mapping[str, str]  # the environment of the launching process
    directory: str
    settings: Settings

    @classmethod
    def plan(
        cls,
        layout: Layout,
        chosen: tuple[LauncherProvider, Callable[[], Launcher]],
        settings: Settings,
        environ: Mapping[str, str],
        directory: str,
        more: bool = False,
    ) -> RemotePlan:
        """Make the plan of a job whose ranks run on the hosts of ``layout``.

        ``chosen`` is the result of ``choose_launcher``. ``directory`` is the working directory of the ranks. ``more``
        means that hosts may be added later. Raises ValueError, with a message of one line, if no address of this host
        is found for the other hosts.
        """
        provider, build = chosen
        launcher = build()
        hosts = range(len(layout.hosts)) if provider.whole else layout.remote_hosts
        groups = [(host, layout.ranks_of(host)) for host in hosts]
        if provider.per_rank:
            groups = [(layout.ranks[rank], (rank,)) for rank in sorted(rank for _, ranks in groups for rank in ranks)]
        places = tuple(AgentPlace(index, layout.hosts[host], ranks) for index, (host, ranks) in enumerate(groups))
        others = [layout.hosts[host] for host in layout.remote_hosts]
        reach = find_reach(settings, {host: launcher.address(host, environ) for host in others}, more)
        return cls(layout, provider, launcher, places, reach, environ, directory, settings)

    @property
    def local_ranks(self) -> tuple[LaunchedRank, ...]:
        """The ranks that the launching process starts itself."""
        return () if self.provider.whole or self.layout.here < 0 else self.layout.ranks_of(self.layout.here)

    def late_command(self, place: AgentPlace, earlier: Sequence[AgentPlace], access: Access) -> StartCommand:
        """Return a command that starts only one agent, the agent described by ``place``.

        ``earlier`` describes all agents that were started before. ``access`` is the endpoint and the keys with which
        the agent connects to the server. Raises ValueError, with a message of one line, if the launcher has no such
        command.
        """
        public = public_arguments(access, self.settings.number("silence_s"))
        program = agent_program(self.environ)

        def commands(places: Sequence[AgentPlace]) -> Sequence[StartCommand]:
            plan = StartPlan(tuple(places), program, public, self.directory, self.environ, self.settings)
            return self.launcher.commands(plan)

        for command in commands([*earlier, place]):
            if command.agents == (place.index,):
                return command
        # One command starts all agents. So ask for the command of a job with a single agent, and use it for this agent.
        (command,) = commands([replace(place, index=0)])
        if command.task == "public":
            raise ValueError(f"launcher {self.provider.name} cannot start one agent more")
        return replace(command, agents=(place.index,))

    def commands(self, access: Access | None = None) -> Sequence[StartCommand]:
        """Return the commands that start the agents.

        ``access`` is the endpoint and the keys with which agents connect to the server. If ``access`` is None, the
        commands are only for display: they contain words such as PORT in place of addresses and keys. Raises ValueError
        if the launcher's commands do not start each agent exactly once.
        """
        if access is None:
            address = self.reach.bind.replace(":0", ":PORT") or "ipc://NAME"
            public: tuple[str, ...] = ("public", address, "PUBLIC-KEY", self.settings.text("silence_s"))
        else:
            public = public_arguments(access, self.settings.number("silence_s"))
        program = agent_program(self.environ)
        plan = StartPlan(self.places, program, public, self.directory, self.environ, self.settings)
        commands = self.launcher.commands(plan)
        called = sorted(index for command in commands for index in command.agents)
        if called != list(range(len(self.places))):
            raise ValueError(f"launcher {self.provider.name} would start agents {called} of {len(self.places)}")
        return commands
