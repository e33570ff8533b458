"""Build the search for better settings of a job, as the job's settings describe it.

The parts of a search are the settings that it may change (knobs), its tuner and its first values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from ddlcore.config.loading import Settings
from ddlcore.contracts.tuner import Knob, Tuner
from ddlcore.errors import TransportError
from ddlcore.plug.registry import Registry
from ddlcore.runtime.routes import Route, choose_route
from ddlcore.tune.driver import SearchDriver, SearchPlan, SearchWatcher
from ddlcore.tune.log import CsvLog
from ddlcore.tune.space import COMPRESSION, CORE, choose
from ddlcore.types import Member, Value

FIXED_BY = ("flag", "env")  # settings from these sources are not searched
SEED = 1


def build_search_driver(
    settings: Settings,
    registry: Registry,
    hosts: Sequence[int] | None,
    launcher: str = "",
    watchers: Sequence[SearchWatcher] = (),
    warm: Sequence[Mapping[str, Value]] = (),
) -> SearchDriver:
    """Return a search for better settings, as ``settings`` describe it.

    ``hosts``: the host index of each rank; None if the hosts are not known yet. ``launcher``: the name of the launcher
    that starts the ranks. ``watchers`` are informed of each step of the search. ``warm``: combinations of settings to
    try first. Raises ValueError or PluginError, with a message of one line, for settings that cannot be used.
    """
    if not settings["replay"]:
        raise ValueError("autotune measures steps that are replayed, and replay is off; leave --no-replay out")
    log = settings.text("autotune_log")
    own: list[SearchWatcher] = [CsvLog(log)] if log else []
    return SearchDriver(plan_search(settings, registry, hosts, launcher, warm), [*own, *watchers])


def plan_search(
    settings: Settings,
    registry: Registry,
    hosts: Sequence[int] | None,
    launcher: str = "",
    warm: Sequence[Mapping[str, Value]] = (),
) -> SearchPlan:
    """Return the plan of a search: the settings to change, their first values, and the number of steps to measure.

    The parameters and errors are the same as those of ``build_search_driver``.
    """
    default: dict[str, Value] = {name: value for name, value in settings.items() if name != "overlap"}
    across = 2 if hosts is None else len(set(hosts))
    default["overlap"] = "on" if settings.overlaps(across) else "off"
    fixed = [name for name in settings if settings.source(name) in FIXED_BY]
    knobs = choose(_knobs(settings, registry, hosts, launcher), fixed)
    if not knobs:
        raise ValueError(
            "autotune: every setting that could be searched is given by a flag or variable; leave some out"
        )
    make = partial(_make_tuner, registry, chosen_tuner(settings, registry))
    make(knobs)  # imports the tuner's modules now, not while the ranks train
    return SearchPlan(
        knobs,
        {knob.name: default[knob.name] for knob in knobs},
        make,
        settings.whole("autotune_trials"),
        settings.whole("autotune_steps"),
        settings.whole("autotune_warmup_steps"),
        tuple(warm),
    )


def chosen_tuner(settings: Settings, registry: Registry) -> str:
    """Return the name of the tuner that ``settings`` choose. Raises PluginError if that tuner cannot be used."""
    name = settings.text("tuner")
    if name == "auto":
        bayes = registry.tuners.get("bayes")
        return "grid" if bayes is None or registry.missing(bayes) else "bayes"
    registry.load(registry.named(Registry.tuners, name))
    return name


def _make_tuner(registry: Registry, name: str, knobs: Sequence[Knob]) -> Tuner:
    return registry.load(registry.named(Registry.tuners, name))(knobs, SEED)


def _knobs(settings: Settings, registry: Registry, hosts: Sequence[int] | None, launcher: str) -> list[Knob]:
    """Return the settings that the search may change (knobs): those of the core and of the plugins that ranks will use.

    ``hosts`` and ``launcher``: see ``build_search_driver``.
    """
    knobs = list(CORE)
    if settings["autotune_compression"]:
        knobs.append(COMPRESSION)
    knobs += registry.named(Registry.fusion_policies, settings.text("fusion_policy")).knobs
    if hosts is None or len(hosts) < 2:
        return knobs
    members = [Member(rank, host) for rank, host in enumerate(hosts)]
    with contextlib.suppress(TransportError):  # the ranks report this themselves, if they call init at all
        route = choose_route(settings.text("backend"), members, registry, launcher)
        knobs += _flat_or_not(settings.text("backend"), route)
        for provider in dict.fromkeys(route.providers()):
            knobs += provider.knobs
    return knobs


def _flat_or_not(backend: str, route: Route) -> list[Knob]:
    """Return the knob that chooses between two ways to reduce: within each host first, or among all ranks at once.

    Return an empty list if ``route`` does not combine one transport within hosts and one across them.
    """
    if not route.parts or route.kinds:
        return []
    cross = route.parts[1].name
    return [Knob("backend", choices=(backend, cross), reopens=True, doc="by hosts first, or flat")]
