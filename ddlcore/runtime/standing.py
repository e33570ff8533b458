"""Puts a stall in replay into words: who waits in which batch, who has not come to it, and what is missing there.

Pure, and part of the coordinator's state machine. In replay the coordinator does not know what is ready;
so a rank that stands at one batch for too long says so, and the other members are asked where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ddlcore.messages import Standing
from ddlcore.runtime.checks import describe
from ddlcore.runtime.stall_table import Late, on_ranks, stall_table

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
        self.what = ""  # of the last report, in a line

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
        if self._asked_s is None:
            self._asked_s = now_s
        if self._awaited and now_s < self._asked_s + ANSWER_S:
            return []
        told = self._told
        there = {rank for rank, one in told.items() if _has_come(one, alarm)}
        self.absent = tuple(sorted((told.keys() - there) | self._awaited))
        late = self._late(alarm, there, warning_s + now_s - self._asked_s)
        self.what = "; ".join([_waiting(late), *self._elsewhere(alarm, there)])
        notes = "".join(f"\n  {note}" for note in self._elsewhere(alarm, there))
        self._told = {}  # said
        where = f"in replay (epoch {alarm.epoch}, place {alarm.place})"
        return [f"stalled for more than {warning_s:g} s {where}:\n{stall_table(late)}{notes}"]

    def _late(self, alarm: Standing, there: Collection[int], waits_s: float) -> list[Late]:
        """The tensors of the batch that some rank lacks; all of them where none does."""
        found = []
        everyone = sorted(self._told.keys() | self._awaited)
        for name in alarm.names:
            ready = tuple(rank for rank in everyone if rank in there or self._has(rank, name, alarm))
            missing = tuple(rank for rank in everyone if rank not in ready)
            found.append(Late(name, alarm.set_id, ready, missing, waits_s))
        return [one for one in found if one.missing] or found

    def _has(self, rank: int, name: str, alarm: Standing) -> bool:
        one = self._told.get(rank)
        return one is not None and one.place == alarm.place and name not in one.missing

    def _elsewhere(self, alarm: Standing, there: Collection[int]) -> list[str]:
        """What a table has no column for, ranks of whom the same is to be said together."""
        said: dict[str, list[int]] = {}
        for rank, one in sorted(self._told.items()):
            if rank not in there and one.place != alarm.place:
                said.setdefault(_place(one), []).append(rank)
        if self._awaited:
            said["not answering"] = sorted(self._awaited)
        notes = [f"{on_ranks(ranks)}: {what}" for what, ranks in said.items()]
        if not notes and there == self._told.keys():
            notes = ["every rank has entered it: the transport or the network holds it up"]
        return notes


def _has_come(one: Standing, alarm: Standing) -> bool:
    """It has entered the batch, or gone on: the root of a broadcast need not wait for the others."""
    return one.place > alarm.place or (one.launched and one.place == alarm.place)


def _waiting(late: Sequence[Late]) -> str:
    """The same in half a line, for an error."""
    first = late[0]
    alike = [one.name for one in late if one.missing == first.missing]
    lacking = f"but not on {on_ranks(first.missing)}" if first.missing else "and under way"
    return f"{_called(alike, first.set_id)} is ready on {on_ranks(first.ready)}, {lacking}"


def _place(one: Standing) -> str:
    """Where a rank is that stands at another batch."""
    if one.launched:
        return f"in {_called(one.names, one.set_id)} (place {one.place})"
    return f"at place {one.place}, without {_called(one.missing, one.set_id)}"


def _called(names: Iterable[str], set_id: int) -> str:
    return describe([name or "(a call without a name)" for name in names], set_id)
