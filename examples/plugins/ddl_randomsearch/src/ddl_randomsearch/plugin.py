"""Describes ddl_randomsearch to ddl without importing the tuner."""

from __future__ import annotations

from ddlcore.hooks import TunerProvider, hookimpl

__all__ = ["ddl_tuners"]


@hookimpl
def ddl_tuners() -> list[TunerProvider]:
    """Return the tuner that `ddl tune` uses if it is asked for randomsearch."""
    return [
        TunerProvider(
            "randomsearch",
            "ddl_randomsearch.tuner:RandomSearchTuner",
            doc="random, at first anywhere, then closer and closer to the best",
        )
    ]
