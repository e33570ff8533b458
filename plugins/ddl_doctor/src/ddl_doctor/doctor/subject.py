"""Define the input of ``ddl doctor``: the ranks, hosts and settings to examine, and the user's request.

Examines nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddl_doctor.gpu_driver import open_driver, visible
from ddlcore.config.loading import Settings
from ddlcore.launch.job.launcher import check_route
from ddlcore.launch.job.placement import Placed, place_ranks
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of


@dataclass(frozen=True)
class Question:
    """The user's request to the doctor: what to measure, and which program to watch."""

    links: bool = True
    model_mb: float = 100.0
    program: tuple[str, ...] = ()  # the command of the ranks, resolved; (): watch no program
    command: tuple[str, ...] = ()  # the same command as the user wrote it
    steps: int = 30
    seconds: float = 120.0


@dataclass(frozen=True)
class ExaminedJob:
    """The ranks and hosts to examine, with their settings."""

    placed: Placed
    settings: Settings
    registry: Registry
    environ: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        return self.placed.layout

    def host_of(self, rank: int) -> str:
        """Return the name of the host of ``rank``, in the form in which the user wrote the name."""
        return self.layout.hosts[self.layout.ranks[rank]]

    def settings_with(self, **flags: object) -> Settings:
        """Return a copy of the settings in which ``flags`` are set as if they were given on the command line."""
        given = {name: self.settings[name] for name in self.settings if self.settings.source(name) == "flag"}
        return settings_of(self.environ, {**given, **flags}, registry=self.registry)[0]

    def without(self, hosts: Sequence[str]) -> ExaminedJob | None:
        """Return a copy of this object without the ranks on ``hosts``, or None if no rank is left."""
        layout = self.layout
        left = [f"{name}:{layout.ranks.count(index)}" for index, name in enumerate(layout.hosts) if name not in hosts]
        if not left:
            return None
        placed = place_ranks(None, ",".join(left), None, self.settings, self.registry, self.environ)
        return replace(self, placed=placed)


def subject_of(
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
) -> ExaminedJob:
    """Return the ranks, hosts and settings to examine, from the values on the command line.

    ``num_proc``, ``hosts`` and ``hostfile`` are the values of -np, -H and --hostfile; None means not given. If all
    three are None, the ranks run on this host: one for each visible GPU, and at least two. Raises ValueError or
    PluginError, with a message of one line, if a value is wrong or the ranks cannot be placed on the hosts.
    """
    settings, registry = settings_of(environ, flags)
    if num_proc is None and hosts is None and hostfile is None:
        driver = open_driver()
        gpus = visible(driver.gpus(), environ.get("CUDA_VISIBLE_DEVICES")) if driver is not None else []
        num_proc = max(2, len(gpus))
    placed = place_ranks(num_proc, hosts, hostfile, settings, registry, environ)
    check_route(settings.text("backend"), placed.layout.ranks, registry, placed.launcher)
    return ExaminedJob(placed, settings, registry, environ)
