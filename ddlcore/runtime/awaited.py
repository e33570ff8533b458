"""Describes what a world waits for: which ranks have to answer before something goes on, and what they were asked. Pure.

Every state of the coordinator in which it, or a rank, waits for ranks yields one ``Awaited``. One check goes over all of
them (``stall.py``), so a wait that stands in this list is reported and comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ddlcore.runtime.stall_table import Late

__all__ = ["WHY_SILENT", "Awaited", "Details"]

WHY_SILENT = "its process is stopped, or a call in native code holds the interpreter lock"


@dataclass(frozen=True)
class Details:
    """What a report says of a wait, at the moment when it is asked for."""

    ranks: tuple[int, ...]  # whose answer is missing; () where all have entered, and the transport holds them up
    tensors: tuple[Late, ...] = ()  # that wait; their ``waits_s`` is filled in by who reports
    notes: tuple[str, ...] = ()  # lines for which the table of tensors has no column


@dataclass(frozen=True)
class Awaited:
    """One wait. ``key`` is the same for as long as it is the same wait; its age is counted from when it first appears."""

    key: Hashable
    where: str  # behind "stalled for more than 60 s": "in discovery"
    asked: str  # what the missing ranks were asked last: "to stop launching (Freeze of epoch 3)"
    details: Callable[[], Details]  # made only for a wait that has lasted: there may be thousands of short ones
    waited_s: float = 0.0  # how long it had lasted already when it was told of
    only_silent: bool = False  # no stall as long as the ranks answer: they may take their time
    ends: bool = True  # whether it may end the job
    why: str = WHY_SILENT
