"""Start what observes a rank while it trains, such as the metrics of the package ddl-prometheus.

The hook ``ddl_observers`` names the observers. None of them takes part in a training step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from ddlcore.config.loading import Settings
from ddlcore.hooks import ObserverProvider
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.observing import Observation
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import absent_setting
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Stats
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Placement

log = logging.getLogger("ddl")


class ObservedRank(Protocol):
    """The rank that is observed. A started Job implements this protocol. Any thread may call its methods."""

    rank: int
    size: int
    launched: Placement
    settings: Settings
    registry: Registry
    tensor_queue: TensorQueue
    lookout: Lookout
    address: str
    timeline_dir: str

    def start_timeline(self, file: str, mark_cycles: bool = False, directory: str = "") -> None: ...

    def doing(self) -> str: ...

    def launched_members(self, set_id: int) -> tuple[int, ...]: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def report(self) -> WorldReport | None: ...

    def stats(self) -> Stats: ...

    def stats_of_world(self) -> Stats: ...

    def tell(self, message: Observation) -> None: ...


class RankObserver:
    """The base class of an observer of one rank. It observes in threads of its own, from its creation to ``close``.

    An observer may also only start what records the rank, as that of timelines does.

    The thread that calls ``init`` creates it, once for each world of an elastic job, and the thread that leaves the
    world closes it.
    """

    @classmethod
    def check(cls, settings: Settings, here: bool) -> None:
        """Raise ValueError, with a message of one line, if no rank can be observed as ``settings`` ask for.

        The launcher calls this before it starts anything. ``here`` is true if ranks will be started on its own host.
        """

    def __init__(self, rank: ObservedRank) -> None:
        """Begin to observe ``rank``. Raises ValueError, with a message of one line, if that is not possible."""

    def close(self) -> None:
        """Stop observing. A second call has no effect."""


def check_observers(settings: Settings, registry: Registry, here: bool) -> None:
    """Check that ranks can be observed as ``settings`` ask for, before anything is started.

    ``here`` is true if ranks will be started on this host. Raises PluginError if an observer cannot be used here, and
    ValueError if it cannot observe as the settings ask for. The messages have one line.
    """
    for provider in _wanted(settings, registry):
        observer: type[RankObserver] = registry.load(provider)
        observer.check(settings, here)


def observers(rank: ObservedRank, environ: Mapping[str, str]) -> list[RankObserver]:
    """Start and return all observers that the settings of ``rank`` ask for.

    Raises PluginError or ValueError, with a message of one line, if an observer cannot be started. In this case the
    observers that were started before are closed. ``environ`` is the environment of this process.
    """
    if rank.launched.local_rank == 0:
        _warn_of_absent(rank.registry, environ)
    made: list[RankObserver] = []
    try:
        for provider in _wanted(rank.settings, rank.registry):
            made.append(rank.registry.load(provider)(rank))
    except BaseException:
        for one in made:
            one.close()
        raise
    return made


def _warn_of_absent(registry: Registry, environ: Mapping[str, str]) -> None:
    """Warn of each variable that has no effect here because its package is missing on this host.

    The launching host may have the package, and then nothing else tells the user why this host's ranks are not observed.
    """
    packages = set(ALIASES["observer"].values())
    for name in (name for name, package in ALIASES["setting"].items() if package in packages):
        why = absent_setting(name, registry)
        if why and environ.get(f"DDL_{name.upper()}", "").strip("0."):  # neither empty nor 0
            log.warning("DDL_%s has no effect on this host; %s", name.upper(), why)


def _wanted(settings: Settings, registry: Registry) -> list[ObserverProvider]:
    return [one for one in registry.observers.values() if settings.get(one.setting)]
