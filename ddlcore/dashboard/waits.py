"""Find out which ranks wait for which, from what the ranks say about their operations. It has no I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.messages import Activity

LEAST_S = 0.9  # a rank waits if nothing has moved on it for so long, which two pulses in succession tell
ALL_IN_S = 3.0  # after so long, a wait is reported although no rank is missing


@dataclass(frozen=True)
class Told:
    """What is known of a running rank. ``silent``: it has sent no pulse for too long."""

    activity: Activity
    silent: bool = False


@dataclass(frozen=True)
class Wait:
    """Some operations that wait: those in ``ready`` have submitted them, those in ``missing`` have not.

    If no rank is missing, all ranks have entered the operations, and the transport or the network holds them up.
    """

    names: tuple[str, ...]
    more: int  # further operations in flight, which the ranks did not name
    ready: tuple[int, ...]
    missing: tuple[int, ...]
    waits_s: float


def waits_of(told: Mapping[int, Told]) -> list[Wait]:
    """Return what waits, the longest wait first. ``told`` holds all ranks that run."""
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


def _lacks(one: Told, operation: tuple[str, tuple[int, ...]]) -> bool:
    """Return whether the rank has certainly not submitted ``operation``, or does not answer.

    A rank names only its first operations in flight, in alphabetical order. An operation after the last name may be
    among the others.
    """
    activity = one.activity
    if one.silent:
        return True
    if operation in activity.in_flight:
        return False
    return len(activity.in_flight) == activity.pending or operation < activity.in_flight[-1]
