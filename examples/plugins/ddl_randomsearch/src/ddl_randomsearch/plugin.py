"""Introduces ddl_randomsearch to ddl by data alone."""

from __future__ import annotations

from ddlcore.hooks import TunerProvider, hookimpl

__all__ = ["ddl_tuners"]


@hookimpl
def ddl_tuners() -> list[TunerProvider]:
    """What `ddl tune` uses where it is asked for randomsearch."""
    return [
        TunerProvider(
            "randomsearch",
            "ddl_randomsearch.tuner:RandomSearchTuner",
            doc="random, at first anywhere, then nearer and nearer to the best",
        )
    ]
