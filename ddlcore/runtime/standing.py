"""Puts a stall in replay into words: who waits in which batch, who has not come to it, and what is missing there.

Pure, and part of the coordinator's state machine. In replay the coordinator does not know what is ready;
so a rank that stands at one batch for too long says so, and the other members are asked where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddlcore.messages import Standing
from ddlcore.runtime.checks import describe

__all__ = ["Standings"]

ANSWER_S = 2.0  # a control thread answers at once; a process that was stopped does not


class Standings:
    """What the ranks have said since the last alarm."""

    def __init__(self) -> None:
        self._alarm: Standing | None = None
        self._told: dict[int, Standing] = {}
        self._awaited: set[int] = set()
        self._asked_s: float | None = None
        self.absent: tuple[int, ...] = ()  # of the last report: the ranks that are waited for

    def hear(self, rank: int, standing: Standing, members: Iterable[int]) -> list[int]:
        """``rank`` stands there. ``members``: of the batch's process set. The ranks that are to be asked where they are."""
        known = self._alarm
        ask: list[int] = []
        if standing.alarm and (known is None or (known.epoch, known.place) != (standing.epoch, standing.place)):
            self._alarm = standing
            self._told = {}
            self._asked_s = None
            ask = [member for member in members if member != rank]
            self._awaited = set(ask)
        if self._alarm is not None and standing.epoch == self._alarm.epoch:
            self._told[rank] = standing
            self._awaited.discard(rank)
        return ask

    def report(self, epoch: int, now_s: float, warning_s: float) -> list[str]:
        """The report, once, when all have answered or have had time to. ``epoch`` is the present one."""
        alarm = self._alarm
        if alarm is None or not self._told or warning_s <= 0:
            return []
        if alarm.epoch != epoch:  # replay was left meanwhile: what waits is in the coordinator's table
            self._told = {}
            return []
        if self._awaited:
            if self._asked_s is None:
                self._asked_s = now_s
            if now_s < self._asked_s + ANSWER_S:
                return []
        there = sorted(rank for rank, one in self._told.items() if one.launched and one.place == alarm.place)
        absent = [_absent(rank, one, alarm) for rank, one in sorted(self._told.items()) if rank not in there]
        absent += [f"rank {rank} does not answer" for rank in sorted(self._awaited)]
        self.absent = tuple(sorted((self._told.keys() - set(there)) | self._awaited))
        self._told = {}  # said
        where = f"{_called(alarm.names, alarm.set_id)} (epoch {alarm.epoch}, place {alarm.place})"
        waits = f"is under way on rank {', '.join(map(str, there))}" if there else "waits for the rest of its batch"
        return [f"stalled for more than {warning_s:g} s in replay: {where} {waits}; " + "; ".join(absent)]


def _absent(rank: int, one: Standing, alarm: Standing) -> str:
    if one.launched:
        return f"rank {rank} is in {_called(one.names, one.set_id)} (place {one.place})"
    missing = f"has not asked for {_called(one.missing, one.set_id)}"
    if one.place == alarm.place:
        return f"rank {rank} {missing}"
    return f"rank {rank} is at place {one.place} and {missing}"


def _called(names: Iterable[str], set_id: int) -> str:
    return describe([name or "(a call without a name)" for name in names], set_id)
