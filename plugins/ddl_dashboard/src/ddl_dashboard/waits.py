"""Find out which ranks wait for which other ranks, from the operations in flight that the ranks have reported.

This module does no I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl_doctor.reports import Activity

LEAST_S = 0.9  # a rank waits if no operation has ended on it for this time, according to two successive pulses
ALL_IN_S = 3.0  # after this time, a wait is reported even if all ranks have submitted the operation


@dataclass(frozen=True)
class LastReport:
    """The last report of a running rank. ``silent`` is true if the rank has sent no pulse for too long."""

    activity: Activity
    silent: bool = False


@dataclass(frozen=True)
class Wait:
    """Operations that wait for ranks. The ranks in ``ready`` have submitted them, the ranks in ``missing`` have not.

    If ``missing`` is empty, all ranks have submitted the operations, and the transport or the network delays them.
    """

    names: tuple[str, ...]
    more: int  # number of further operations in flight, whose names the ranks did not report
    ready: tuple[int, ...]
    missing: tuple[int, ...]
    waits_s: float


def waits_of(told: Mapping[int, LastReport]) -> list[Wait]:
    """Return the waiting operations in groups, the group with the longest wait first.

    All operations of a group are ready on the same ranks and missing on the same ranks. ``told`` holds the last reports
    of all running ranks.
    """
    waiting = {
        rank: one.activity
        for rank, one in told.items()
        if not one.silent and one.activity.pending and one.activity.waits_s >= LEAST_S
    }
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for operation in sorted({key for activity in waiting.values() for key in activity.in_flight}):
        name, members = operation
        among = [rank for rank in members or told if rank in told]
        missing = tuple(sorted(rank for rank in among if _lacks(told[rank], operation)))
        ready = tuple(sorted(rank for rank in among if rank in waiting and operation in waiting[rank].in_flight))
        stands = not missing and set(among) <= waiting.keys()
        if missing or (stands and min(waiting[rank].waits_s for rank in among) >= ALL_IN_S):
            groups.setdefault((ready, missing), []).append(name)
    found = [_wait(names, ready, missing, waiting) for (ready, missing), names in groups.items()]
    return sorted(found, key=lambda wait: -wait.waits_s)


def _wait(
    names: Sequence[str], ready: tuple[int, ...], missing: tuple[int, ...], waiting: Mapping[int, Activity]
) -> Wait:
    named = max(len(waiting[rank].in_flight) for rank in ready)
    more = max(waiting[rank].pending for rank in ready) - named
    return Wait(tuple(names), more, ready, missing, max(waiting[rank].waits_s for rank in ready))


def _lacks(one: LastReport, operation: tuple[str, tuple[int, ...]]) -> bool:
    """Return whether a rank is silent, or has certainly not submitted ``operation``. ``one`` is the rank's last report.

    A report names only some of the rank's operations in flight: the first ones in alphabetical order. An operation that
    comes after the last name in the report may be in flight, too. In this case, the result is False.
    """
    activity = one.activity
    if one.silent:
        return True
    if operation in activity.in_flight:
        return False
    return len(activity.in_flight) == activity.pending or operation < activity.in_flight[-1]
