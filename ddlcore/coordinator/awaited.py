"""Describes the waits of a world: for which ranks the job waits, and what these ranks were asked to do.

Whenever the coordinator or a rank waits for ranks, the coordinator returns an ``Awaited`` that describes this wait. One
check (``stall.py``) examines all these objects, so that every long wait is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic

from ddlcore.coordinator.stall_table import Late
from ddlcore.messages.ranks import AnyRank

WHY_SILENT = "its process is stopped, or a call in native code holds the interpreter lock"


@dataclass(frozen=True)
class Details(Generic[AnyRank]):
    """The facts about a wait that a report shows. They are collected only when a report is made."""

    ranks: tuple[AnyRank, ...]  # the missing ranks; () if all have entered the collective, so the transport blocks
    tensors: tuple[Late, ...] = ()  # the tensors that wait; the reporter fills in their ``waits_s``
    notes: tuple[str, ...] = ()  # lines for which the table of tensors has no column


@dataclass(frozen=True)
class Awaited(Generic[AnyRank]):
    """One wait for some ranks.

    ``key`` stays the same while the wait lasts. The age of the wait is counted from the time when ``key`` is first
    seen.
    """

    key: Hashable
    where: str  # follows "stalled for more than 60 s" in the report: "in discovery"
    asked: str  # the last request to the missing ranks, such as "to call init()"
    details: Callable[[], Details[AnyRank]]  # called only for long waits, because there may be thousands of short ones
    waited_s: float = 0.0  # how long the wait had already lasted when the coordinator learned of it
    only_silent: bool = False  # it is a stall only if the ranks do not answer: they may need long
    ends: bool = True  # whether this wait may end the job
    why: str = WHY_SILENT
