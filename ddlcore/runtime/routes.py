"""Decides which transport serves a process set: a pure choice among providers, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddlcore.errors import TransportError
from ddlcore.hooks import TransportProvider
from ddlcore.types import Member

__all__ = ["Route", "choose_route"]


@dataclass(frozen=True)
class Route:
    """The transport that is taken, and why."""

    provider: TransportProvider
    reason: str


def choose_route(
    backend: str,
    members: Sequence[Member],
    providers: Mapping[str, TransportProvider],
    missing: Callable[[TransportProvider], str],
) -> Route:
    """The transport for ``members``. ``backend`` is "auto" or a provider's name.

    Raises TransportError in one line where none can serve them.
    """
    if backend != "auto" and len(members) > 1:
        provider = providers.get(backend)
        if provider is None:
            raise TransportError(f"no transport is called {backend!r}; there are {', '.join(sorted(providers))}")
        objection = _objection(provider, members) or missing(provider)
        if objection:
            raise TransportError(f"transport {backend} cannot be used: {objection}")
        return Route(provider, "asked for")
    fitting = [p for p in providers.values() if not p.in_process and not _objection(p, members)]
    usable = [p for p in fitting if not missing(p)]
    if usable:
        hosts = len({member.host for member in members})
        where = (
            "a world of one" if len(members) == 1 else f"{len(members)} ranks on {hosts} host{'s' if hosts > 1 else ''}"
        )
        return Route(max(usable, key=lambda p: (p.priority, p.name)), f"auto: {where}")
    wanted = "; ".join(f"{p.name}: {missing(p)}" for p in fitting)
    raise TransportError(
        "no installed transport serves these ranks"
        + (f" ({wanted})" if wanted else "; across hosts install one that spans them (`ddl info` lists them)")
    )


def _objection(provider: TransportProvider, members: Sequence[Member]) -> str:
    least, greatest = provider.sizes
    if len(members) < least or (greatest is not None and len(members) > greatest):
        return f"it serves {least} to {greatest or 'any number of'} ranks, not {len(members)}"
    if provider.one_host and len({member.host for member in members}) > 1:
        return "it serves the ranks of one host only, and these are on several"
    return ""
