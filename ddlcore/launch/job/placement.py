"""Decide on which hosts the ranks run and which launcher starts them, by the command line and the environment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlcore.config.loading import Settings
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.job.host_table import cooldown_range
from ddlcore.launch.ranks.hosts import Layout, lay_out, parse_hosts, read_hostfile
from ddlcore.plug.registry import Registry
from ddlcore.runtime.backend import parse_backend
from ddlcore.runtime.routes import Route

if TYPE_CHECKING:
    from ddlcore.launch.agents.remote_plan import RemotePlan


@dataclass(frozen=True)
class Placed:
    """The hosts of the ranks, and the remote plan if agents start some of the ranks."""

    layout: Layout
    remote_plan: RemotePlan | None = None
    hosts: tuple[HostSlots, ...] = ()  # all known hosts, first the hosts of the layout; (): only this host
    discovery: HostDiscovery | None = None  # finds the hosts that an elastic job may use later
    most: int = 0  # the most ranks that an elastic job may have at a time; 0: as many as the layout has

    @property
    def launcher(self) -> str:
        """The name of the launcher that starts the agents, or "" if there are no agents."""
        return "" if self.remote_plan is None else self.remote_plan.provider.name

    @property
    def places(self) -> int:
        """The number of different rank numbers that the job may use.

        With host discovery, this is twice the largest number of ranks, because ranks that are leaving still use their
        numbers while new ranks already have others.
        """
        most = max(self.layout.size, self.most)
        return most if self.discovery is None else 2 * most

    def host_names(self) -> list[str]:
        """Return the host name of each rank, in rank order. The name is "" for a rank that may be started later."""
        later = [""] * (self.places - self.layout.size)
        if self.remote_plan is None:
            return [socket.gethostname()] * self.layout.size + later
        return [self.layout.hosts[host] for host in self.layout.ranks] + later


def place_ranks(
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    settings: Settings,
    registry: Registry,
    environ: Mapping[str, str],
    discovery: HostDiscovery | None = None,
) -> Placed:
    """Decide on which hosts the ranks run, and plan the agents if agents are needed.

    ``ranks``, ``hosts`` and ``hostfile`` are the values of the flags -np, -H and --hostfile; None means that the flag
    was not given. Without -H and --hostfile, use the hosts that ``discovery`` finds. If ``discovery`` is None, use the
    hosts of a batch system's allocation; if there is none, use only this host. Raises ValueError or PluginError, with a
    message of one line, if the ranks cannot be placed.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("-H and --hostfile both say where; give one of them")
    entries: Sequence[HostSlots] | None = None
    what, most = "-H", settings.whole("max_np")
    if hosts is not None:
        entries, what = parse_hosts(hosts), f"-H {hosts}"
    elif hostfile is not None:
        entries, what = read_hostfile(hostfile), f"--hostfile {hostfile}"
    if discovery is not None:
        if entries is not None:
            raise ValueError(f"{what.split()[0]} and host discovery both say where; give one of them")
        entries, what = _discovered(discovery, settings), "what host discovery has found"
        slots = sum(one.slots for one in entries)
        most = most or ranks or 0  # the job may grow to this number when more hosts are found
        ranks = min(ranks or slots, slots, most or slots)
    needed = _needed_launcher(settings.text("backend"), registry)
    named = settings.text("launcher") not in ("", "auto")
    if entries is None and not named and not needed and not _allocations(registry, environ):
        return Placed(lay_out(ranks, None), most=most)
    from ddlcore.launch.agents.remote_plan import RemotePlan, choose_launcher

    provider, build = choose_launcher(settings.text("launcher"), needed, registry, environ)
    granted = build().hosts(environ) if entries is None else ()
    if granted:
        entries, what = granted, f"the allocation that {provider.name} sees"
    layout = lay_out(ranks, entries, what=what, resolve=not provider.whole)
    known = tuple(entries or ())
    more = settings.whole("min_np") > 0 and (discovery is not None or len(known) > len(layout.hosts))
    if layout.remote_hosts or (provider.whole and (named or needed or granted)) or more:
        plan = RemotePlan.plan(layout, (provider, build), settings, environ, os.getcwd(), more)
        return Placed(layout, plan, known, discovery, most)
    return Placed(layout, None, known, discovery, most)


def find_discovery(settings: Settings, registry: Registry, environ: Mapping[str, str]) -> HostDiscovery | None:
    """Return the host discovery that ``settings`` name, ready for use. Return None if they name none.

    A host discovery finds the hosts that an elastic job may use. Raises ValueError or PluginError, with a message of
    one line, if the job is not elastic or if the host discovery cannot be used here.
    """
    name = settings.text("host_discovery") or ("script" if settings.text("host_discovery_script") else "")
    if not name:
        return None
    if not settings.whole("min_np"):
        raise ValueError("host discovery is for elastic jobs; add --min-np N")
    discovery = registry.load(registry.named(Registry.discoveries, name))()
    discovery.begin(environ, settings)
    return discovery


def _discovered(discovery: HostDiscovery, settings: Settings) -> Sequence[HostSlots]:
    """Wait until ``discovery`` finds enough hosts for the setting ``min_np``, and return all hosts that it has found.

    Raises ValueError if this takes longer than the setting ``start_timeout_s``.
    """
    least, patience_s = settings.whole("min_np"), settings.number("start_timeout_s")
    until_s = time.monotonic() + patience_s
    while True:
        found = discovery.hosts()
        if sum(one.slots for one in found) >= least:
            return found
        if time.monotonic() >= until_s:
            raise ValueError(
                f"--min-np {least}: host discovery has found {sum(one.slots for one in found)} slots in {patience_s:g} s"
            )
        time.sleep(1.0)


def _needed_launcher(backend: str, registry: Registry) -> str:
    """Return the name of the launcher that a transport named in the setting ``backend`` needs.

    Return "" if none of these transports needs a launcher.
    """
    wanted = parse_backend(backend)
    names = [name for choice in (wanted.default, *wanted.kinds.values()) for name in choice.names]
    providers = [registry.transports[name] for name in names if name in registry.transports]
    return next((provider.launcher for provider in providers if provider.launcher), "")


def _allocations(registry: Registry, environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in an allocation of a batch system for which a launcher is installed.

    The variables in ``environ`` show this.
    """
    return any(
        one.variables and not one.optional and all(name in environ for name in one.variables)
        for one in registry.launchers.values()
    )


def check_elastic(settings: Settings, size: int, route: Route | None) -> None:
    """Check the settings of an elastic job with ``size`` ranks, and raise ValueError if they do not fit together.

    The message has one line. ``route`` names the transports of the job; None means that no transport was found.
    """
    least = settings.whole("min_np")
    if not least:
        if settings.whole("max_np"):
            raise ValueError("--max-np is for elastic jobs; add --min-np N")
        return
    cooldown_range(settings.text("host_cooldown_s"))  # raises an error if it is malformed
    if 0 < settings.whole("max_np") < size:
        raise ValueError(f"--max-np {settings.whole('max_np')} is less than the {size} ranks of the job")
    if least > size:
        raise ValueError(f"--min-np {least} is more than the {size} ranks of the job; give -np {least} or more")
    if route is not None and route.launcher:
        raise ValueError(
            f"--min-np: transport {route.name} ends all ranks with the first that is lost; use --backend auto"
        )
    if settings["autotune"]:
        raise ValueError("--min-np: a search for settings needs the same ranks in all its trials; search without it")
