"""Chooses the transport for a process set's tensors in host memory, and says why it was chosen.

The choice depends only on the arguments of the functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ddlcore.errors import TransportError
from ddlcore.hooks import TransportProvider
from ddlcore.runtime.backend import AUTO, TransportChoice, parse_backend
from ddlcore.types import Kind, Member

HOST = "cpu"


class Offers(Protocol):
    """An object that looks up the installed transports. The registry of ``plug`` implements this protocol."""

    @property
    def transports(self) -> Mapping[str, TransportProvider]:
        """Return all transports by name."""

    def transport(self, name: str) -> TransportProvider:
        """Return the transport with the name ``name``.

        Raises PluginError if that transport is not installed. The message contains the command that installs it, if
        this command is known.
        """

    def missing(self, provider: TransportProvider) -> str:
        """Return why the transport of ``provider`` cannot be used in this process; "" if it can be used."""

    def transports_off(self) -> str:
        """Return text about plugins with transports that the user has switched off, for the end of a message."""


@dataclass(frozen=True)
class Route:
    """A chosen transport, and the reason why it was chosen.

    ``provider`` describes the transport. If it is composed of two other transports, ``parts`` are the routes of these.
    """

    provider: TransportProvider
    reason: str
    parts: tuple[Route, ...] = ()  # for a composed transport: those within the hosts and across hosts
    kinds: Mapping[Kind, Route] = field(default_factory=dict)  # the routes of those kinds that another transport serves

    @property
    def name(self) -> str:
        """Return the name of the route. A user can write this name after ``--backend`` to choose the same route."""
        own = "+".join(part.name for part in self.parts) or self.provider.name
        return ",".join([own, *(f"{kind.name.lower()}={route.name}" for kind, route in self.kinds.items())])

    def serving(self, kind: Kind) -> Route:
        """Return the route that serves operations of ``kind``."""
        return self.kinds.get(kind, self)

    def providers(self) -> Iterator[TransportProvider]:
        """Yield the provider of every transport that is part of the route, at any depth."""
        yield self.provider
        for route in (*self.parts, *self.kinds.values()):
            yield from route.providers()

    @property
    def launcher(self) -> str:
        """Return the name of the launcher that must have started the ranks; "" if any launcher is suitable.

        Raises ValueError if the route's transports require different launchers.
        """
        names = sorted({provider.launcher for provider in self.providers() if provider.launcher})
        if len(names) > 1:
            raise ValueError(
                f"backend {self.name}: its transports want ranks started by {' and by '.join(names)}; choose one"
            )
        return "".join(names)


def choose_route(backend: str, members: Sequence[Member], offers: Offers, launcher: str = "") -> Route:
    """Return the route for the ranks ``members``. See ``parse_backend`` for the forms of ``backend``.

    ``offers`` looks up the installed transports. ``launcher`` is the name of the launcher that started the ranks.
    ``auto`` skips transports that need another launcher. Each error has a message of one line. Raises ValueError if
    ``backend`` is invalid, PluginError if ``backend`` names a transport that is not installed, and TransportError if no
    transport that ``backend`` allows can serve these ranks.
    """
    wanted = parse_backend(backend)
    for choice in (wanted.default, *wanted.kinds.values()):
        for name in choice.names:
            if name != AUTO:
                offers.transport(name)  # raises for an unknown name before anything else
    for kind, choice in wanted.kinds.items():
        for name in choice.names:
            if name != AUTO and HOST not in offers.transport(name).devices:
                raise TransportError(
                    f"backend {backend}: {name} serves {'/'.join(offers.transport(name).devices)}, not host memory, "
                    f"and serves all kinds there; leave {kind.name.lower()}={choice} out"
                )
    chooser = _Chooser(members, offers, launcher)
    default = chooser.choose(wanted.default)
    routes = {choice: chooser.choose(choice) for choice in wanted.kinds.values()}
    kinds = {kind: routes[choice] for kind, choice in wanted.kinds.items() if routes[choice].name != default.name}
    return Route(default.provider, default.reason, default.parts, kinds)


class _Chooser:
    def __init__(self, members: Sequence[Member], offers: Offers, launcher: str) -> None:
        self._size = len(members)
        self._ranks = Counter(member.host for member in members)  # the number of ranks on each host
        self._offers = offers
        self._launcher = launcher

    def choose(self, choice: TransportChoice) -> Route:
        named = [self._offers.transport(name) for name in choice.names if name != AUTO]
        if not named or self._size == 1:
            return self._auto()
        return self._composed(choice, *named) if len(named) == 2 else self._flat(named[0])

    def _flat(self, provider: TransportProvider) -> Route:
        if provider.composes:
            raise TransportError(f"transport {provider.name} is made of two others; name these, as LOCAL+CROSS")
        if HOST not in provider.devices:  # it was named for tensors on devices; host memory needs a transport as well
            route = self._auto()
            return Route(route.provider, f"{route.reason}, for host memory", route.parts)
        self._require(provider)
        return Route(provider, "asked for")

    def _composed(self, choice: TransportChoice, local: TransportProvider, cross: TransportProvider) -> Route:
        for provider in (local, cross):
            if provider.spans_devices:
                raise TransportError(
                    f"backend {choice}: {provider.name} spans hosts and devices by itself; "
                    f"use --backend {provider.name}"
                )
            if HOST not in provider.devices:
                what = "/".join(provider.devices)
                raise TransportError(f"backend {choice}: {provider.name} serves {what}, not host memory")
        if not (local.one_host or local.in_process):
            raise TransportError(
                f"backend {choice}: {local.name} is no transport within a host, which stands first; "
                f"use --backend {local.name} alone, or one like shm before the +"
            )
        if cross.one_host or cross.composes or cross.sizes[1] is not None:
            raise TransportError(f"backend {choice}: {cross.name} does not span hosts, which the second one must")
        if len(self._ranks) == 1:
            self._require(local)
            return Route(local, f"asked for {choice}; all ranks are on one host")
        if self._one_a_host:
            self._require(cross)
            return Route(cross, f"asked for {choice}; each rank is alone on its host")
        for provider in (local, cross):
            missing = self._offers.missing(provider)
            if missing:
                raise TransportError(f"transport {provider.name} cannot be used: {missing}")
        return self._compose(local, cross, "asked for")

    def _auto(self) -> Route:
        fitting = [
            p for p in self._offers.transports.values() if not (p.in_process or p.composes or self._objection(p))
        ]
        fitting = [p for p in fitting if p.launcher in ("", self._launcher) and HOST in p.devices]
        usable = [p for p in fitting if not self._offers.missing(p)]
        if not usable:
            wanted = "; ".join(f"{p.name}: {self._offers.missing(p)}" for p in fitting)
            kind = "one that spans hosts" if len(self._ranks) > 1 else "one for the ranks of a host"
            raise TransportError(
                "no installed transport serves these ranks"
                + (f" ({wanted})" if wanted else f"; install {kind} (`ddl info` prints the commands)")
                + self._offers.transports_off()
            )
        best = max(usable, key=_preference)
        local = self._best_local()
        if len(self._ranks) == 1 or self._one_a_host or best.spans_devices or local is None or not self._composers():
            return Route(best, self._where())
        return self._compose(local, best, self._where())

    def _best_local(self) -> TransportProvider | None:
        local = [p for p in self._offers.transports.values() if p.one_host and HOST in p.devices]
        return max((p for p in local if not self._offers.missing(p)), key=_preference, default=None)

    def _compose(self, local: TransportProvider, cross: TransportProvider, reason: str) -> Route:
        composers = self._composers()
        if not composers:
            raise TransportError(
                f"nothing installed composes {local.name} with {cross.name}; use one of them, or install what does "
                f"(`ddl info` prints the command){self._offers.transports_off()}"
            )
        return Route(max(composers, key=_preference), reason, (Route(local, reason), Route(cross, reason)))

    def _composers(self) -> list[TransportProvider]:
        return [p for p in self._offers.transports.values() if p.composes and not self._offers.missing(p)]

    @property
    def _one_a_host(self) -> bool:
        return max(self._ranks.values()) == 1

    def _where(self) -> str:
        hosts = len(self._ranks)
        if self._size == 1:
            return "auto: a world of one"
        return f"auto: {self._size} ranks on {hosts} host{'s' if hosts > 1 else ''}"

    def _require(self, provider: TransportProvider) -> None:
        objection = self._objection(provider) or self._offers.missing(provider)
        if objection:
            raise TransportError(f"transport {provider.name} cannot be used: {objection}")

    def _objection(self, provider: TransportProvider) -> str:
        least, greatest = provider.sizes
        if self._size < least or (greatest is not None and self._size > greatest):
            return f"it serves {least} to {greatest or 'any number of'} ranks, not {self._size}"
        if provider.one_host and len(self._ranks) > 1:
            return "it serves the ranks of one host only, and these are on several"
        return "" if HOST in provider.devices else f"it serves {'/'.join(provider.devices)}, not host memory"


def asked_for_devices(backend: str, kind: str, offers: Offers) -> str:
    """Return the name of the transport for devices of ``kind`` that the user has chosen in ``backend``.

    Return ``auto`` if ``backend`` names no transport for such devices.
    """
    names = parse_backend(backend).default.names
    named = [offers.transport(name) for name in names if name != AUTO]
    return next((one.name for one in named if HOST not in one.devices and kind in one.devices), AUTO)


def _preference(provider: TransportProvider) -> tuple[int, str]:
    return provider.priority, provider.name
