"""Builds transports and the coordinator's sessions from the settings and the registry of plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddlcore.builtin.by_kind import ByKindTransport
from ddlcore.config.loading import Settings
from ddlcore.contracts.transport import Transport
from ddlcore.plug.registry import Registry
from ddlcore.runtime.patience import Patience
from ddlcore.runtime.routes import Route

if TYPE_CHECKING:
    from ddlcore.coordinator.membership import Coordinating, ElasticMembership
    from ddlcore.coordinator.quorum import Quorum
    from ddlcore.coordinator.sessions import Sessions
    from ddlcore.coordinator.tuning import SearchDriver


def build_transport(registry: Registry, route: Route) -> Transport:
    """Return the transport that ``route`` describes. The transport is not open yet.

    A route is the choice of one transport, or of a combination of transports, for a group of ranks. If only some ranks
    need one of the combined transports, the combination itself creates that transport later, on these ranks.
    """
    make: Callable[..., Transport] = registry.load(route.provider)
    if route.parts:
        local, cross = route.parts
        make_cross = partial(build_transport, registry, cross)
        default = make(build_transport(registry, local), make_cross, cross.provider.attended)
    else:
        default = make()
    if not route.kinds:
        return default
    made = {one.name: build_transport(registry, one) for one in route.kinds.values()}
    return ByKindTransport(default, {kind: made[one.name] for kind, one in route.kinds.items()})


def build_sessions(
    size: int,
    settings: Settings,
    registry: Registry,
    driver: SearchDriver | None = None,
    refuses: str = "",
    membership: ElasticMembership | None = None,
    term: str = "",
) -> Sessions:
    """Return the coordinator's side of a launch of ``size`` ranks, to be used by a control server.

    ``driver`` searches for better settings while the job runs, see process/search.py. ``refuses``: "", or a reason why
    no world can begin in this launch; every rank that calls ``init`` gets that reason. ``membership``: which worlds an
    elastic job has; None: it is not elastic. ``term``: see Sessions. Raises ValueError or PluginError, with a message
    of one line, for invalid settings.
    """
    name = settings.text("fusion_policy")
    provider = registry.fusion_policies.get(name)
    if provider is None:
        raise ValueError(
            f"no fusion policy is called {name!r}; there are {', '.join(sorted(registry.fusion_policies))}"
        )
    # Imported here: a rank that a launcher has started needs this module for its transports, and never a coordinator.
    from ddlcore.coordinator.sessions import Sessions

    policy = registry.load(provider)()
    compression = settings.text("compression")
    registry.named(Registry.compressors, compression)  # raises an error for an unknown name, before any rank starts
    replay = bool(settings["replay"])
    return Sessions(size, policy, patience_of(settings), replay, driver, compression, refuses, membership, term)


def build_membership(
    hosts: Sequence[int],
    settings: Settings,
    places: int = 0,
    most: int = 0,
    quorum: Quorum | None = None,
    coordinator: Coordinating | None = None,
) -> ElasticMembership | None:
    """Return what decides which processes of an elastic job form a world; None if ``settings`` ask for no such job.

    ``hosts``: (size,), the host index of each rank of the launch. There may be up to ``places`` ranks later, ``most`` of
    them at a time; 0: those of ``hosts``. ``quorum`` and ``coordinator``: see ElasticMembership.
    """
    least = settings.whole("min_np")
    if not least:
        return None
    from ddlcore.coordinator.membership import Coordinating, ElasticMembership, MemberPatience

    timeout_s, resets = settings.number("elastic_timeout_s"), settings.whole("reset_limit")
    later = (-1,) * (places - len(hosts))
    patience = MemberPatience(
        timeout_s,
        settings.number("start_timeout_s"),
        settings.number("stall_warning_s"),
        settings.number("evict_after_s"),
    )
    return ElasticMembership(
        (*hosts, *later), least, most or len(hosts), patience, resets, quorum, coordinator or Coordinating()
    )


def patience_of(settings: Settings) -> Patience:
    """Return the settings about stalls as a ``Patience``: when a wait is reported, and when it ends the job."""
    evict_s = settings.number("evict_after_s") if settings.whole("min_np") else 0.0
    limit_s = evict_s or settings.number("stall_shutdown_s")
    return Patience(settings.number("stall_warning_s"), limit_s, bool(settings["stall_stacks"]), evict_s > 0)
