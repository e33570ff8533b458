"""Starts the timeline of a rank when the rank begins to train, if the settings of the job ask for a timeline."""

from __future__ import annotations

from pathlib import Path

from ddlcore.config.loading import Settings
from ddlcore.process.observers import ObservedRank, RankObserver


def wanted_file(settings: Settings) -> Path | None:
    """Return the file of the timeline that is recorded from the begin of the job on, or None if none is.

    With the value "dynamic", as in Horovod, only the script starts timelines.
    """
    text = settings.text("timeline")
    return Path(text).absolute() if text and text.upper() != "DYNAMIC" else None


class Starting(RankObserver):
    """An observer that only starts the timeline of a rank. The rank itself ends the timeline, after its last operation."""

    def __init__(self, rank: ObservedRank) -> None:
        file = wanted_file(rank.settings)
        if file is not None:
            rank.start_timeline(str(file), bool(rank.settings["timeline_mark_cycles"]), rank.timeline_dir)
