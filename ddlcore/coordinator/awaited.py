"""Describes what a world waits for: which ranks must answer before something continues, and what they were asked. Pure.

Every state of the coordinator in which it or a rank waits for ranks yields one ``Awaited``. A single check goes over
all of them (``stall.py``), so each wait in this list is reported and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ddlcore.coordinator.stall_table import Late

WHY_SILENT = "its process is stopped, or a call in native code holds the interpreter lock"


@dataclass(frozen=True)
class Details:
    """What a report says about a wait, at the moment of the report."""

    ranks: tuple[int, ...]  # the ranks that have not answered; () if all have entered, so the transport blocks
    tensors: tuple[Late, ...] = ()  # the tensors that wait; the reporter fills in their ``waits_s``
    notes: tuple[str, ...] = ()  # lines for which the table of tensors has no column


@dataclass(frozen=True)
class Awaited:
    """One wait. ``key`` stays the same while the wait lasts; its age is counted from when the key first appears."""

    key: Hashable
    where: str  # follows "stalled for more than 60 s" in the report: "in discovery"
    asked: str  # the last request to the missing ranks:
    details: Callable[[], Details]  # called only for a long wait: there may be thousands of short ones
    waited_s: float = 0.0  # how long it had already lasted when it was reported
    only_silent: bool = False  # it is no stall while the ranks answer: they may need long
    ends: bool = True  # whether this wait may end the job
    why: str = WHY_SILENT
