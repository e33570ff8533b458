"""Defines what records the timelines of a rank. A plugin has it: most ranks record none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.observe.clock import Reading
from ddlcore.runtime.events import Events
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.types import Placement


@dataclass(frozen=True)
class RecordedRank:
    """What a recorder may use of its rank.

    ``clock`` reads the clock of the process that keeps the ``store``; a trace uses it as the common clock of all ranks.
    ``launched`` is this process's rank among all launched ranks, with their hosts. ``ranks`` are those of the launched
    ranks that belong to this world. ``facts`` are other facts about the job that each trace must contain.
    """

    sets: ProcessSets
    meter: Meter
    store: Store
    clock: Callable[[], Reading]
    launched: Placement
    ranks: tuple[LaunchedRank, ...]
    facts: Mapping[str, object]


class Recorder(ABC):
    """Records one timeline of a rank after the other. Only one thread at a time uses this object."""

    @abstractmethod
    def __init__(self, rank: RecordedRank) -> None:
        """Create the recorder of ``rank``. No timeline is recorded yet."""

    @abstractmethod
    def begin(
        self, file: Path, mark_cycles: bool, directory: Path | None, world: str, report: WorldReport | None
    ) -> Events:
        """Begin to record a timeline into ``file``, and return the listener that adds the rank's events to it.

        ``directory`` is where the launcher expects the ranks' parts, which it merges itself; None if the ranks must
        merge them. ``mark_cycles``: mark where each period of a schedule begins. ``world`` names the world in the trace.
        ``report`` is what is known of the world of an elastic job: there, ranks have the number of the launch in the
        trace. Raises ValueError, with a message of one line, if a timeline is already recorded or its file cannot be
        written.
        """

    @abstractmethod
    def end(self, patience_s: float, leaving: bool) -> None:
        """End the timeline. The call has no effect if no timeline is being recorded.

        If the launcher does not merge the parts, the other ranks send their parts to rank 0. Rank 0 waits at most
        ``patience_s`` seconds for these parts, and merges the parts that have arrived. ``leaving``: this rank leaves the
        job after this call, so it is the last one.
        """
