"""Describes stalls that only the ranks can see: who waits in which bucket, who has not reached it, what is missing.

It has no I/O and no clock, and is part of the coordinator's state machine. In replay, the coordinator does not know
which tensors are ready. For buckets that it has decided, it does not know how far the ranks are. So a rank that has
been at one bucket for long reports that, and the coordinator asks the other members at which bucket they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.stall_table import Late, on_ranks
from ddlcore.messages import Busy, ReplayStatus
from ddlcore.runtime.checks import describe

ALL_ENTERED = "every rank has entered it: the transport or the network holds it up"


class ReplayStatuses:
    """The last alarm of a rank that has been at one bucket for long, and the replay status of each rank since then."""

    def __init__(self) -> None:
        self._alarm: ReplayStatus | None = None
        self._told: dict[int, ReplayStatus] = {}
        self._awaited: set[int] = set()

    def hear(self, rank: int, replay_status: ReplayStatus, members: Iterable[int]) -> list[int]:
        """Take the replay status of ``rank``, and return the ranks that must be asked for theirs.

        ``members``: the members of the bucket's process set.
        """
        known = self._alarm
        if replay_status.moved:
            if known is not None and (known.epoch, known.place) == (replay_status.epoch, replay_status.place):
                self._alarm = None
            return []
        ask: list[int] = []
        if replay_status.alarm and (
            known is None or (known.epoch, known.place) != (replay_status.epoch, replay_status.place)
        ):
            self._alarm = replay_status
            self._told = {}
            ask = [member for member in members if member != rank]
            self._awaited = set(ask)
        if self._alarm is not None and replay_status.epoch == self._alarm.epoch:
            self._told[rank] = replay_status
            self._awaited.discard(rank)
        return ask

    def awaited(self, epoch: int, present: Collection[int]) -> list[Awaited]:
        """Return the wait for the bucket of the last alarm. There is none if replay was left or the rank has gone on.

        ``epoch`` is the present epoch. ``present`` are the ranks that have not left.
        """
        alarm = self._alarm
        if alarm is None or alarm.epoch != epoch:  # replay was left meanwhile, so no rank waits for this bucket
            return []
        where = f"in replay (epoch {alarm.epoch}, place {alarm.place})"
        asked = f"where it is in replay (Where of epoch {alarm.epoch})"
        key = ("place", alarm.epoch, alarm.place)
        return [Awaited(key, where, asked, lambda: self._details(alarm, present), alarm.waits_s)]

    def _details(self, alarm: ReplayStatus, present: Collection[int]) -> Details:
        told = self._told
        there = {rank for rank, one in told.items() if _has_come(one, alarm)}
        absent = (told.keys() - there) | self._awaited
        absent -= absent - set(present)
        return Details(tuple(sorted(absent)), tuple(self._late(alarm, there)), tuple(self._other_places(alarm, there)))

    def _late(self, alarm: ReplayStatus, there: Collection[int]) -> list[Late]:
        """Return those tensors of the bucket in ``alarm`` that at least one rank lacks.

        If no rank lacks any, return all.

        ``there`` are the ranks that have entered the bucket.
        """
        found = []
        everyone = sorted(self._told.keys() | self._awaited)
        for name in alarm.names:
            ready = tuple(rank for rank in everyone if rank in there or self._has(rank, name, alarm))
            missing = tuple(rank for rank in everyone if rank not in ready)
            found.append(Late(name, alarm.set_id, ready, missing, 0.0))
        return [one for one in found if one.missing] or found

    def _has(self, rank: int, name: str, alarm: ReplayStatus) -> bool:
        one = self._told.get(rank)
        return one is not None and one.place == alarm.place and name not in one.missing

    def _other_places(self, alarm: ReplayStatus, there: Collection[int]) -> list[str]:
        """Return lines about ranks that are at other buckets than the one that ``alarm`` reports.

        The table of tensors has no column for that. ``there`` are the ranks that have entered the reported bucket.
        Ranks to which the same line applies share it. If all ranks have entered the bucket, a single line says that.
        """
        said: dict[str, list[int]] = {}
        for rank, one in sorted(self._told.items()):
            if rank not in there and one.place != alarm.place:
                said.setdefault(_place(one), []).append(rank)
        notes = [f"{on_ranks(ranks)}: {what}" for what, ranks in said.items()]
        if not notes and not self._awaited and there == self._told.keys():
            notes = [ALL_ENTERED]
        return notes


class Busies:
    """The work in which the engines of ranks have been for long.

    It is a bucket that was negotiated, or work outside a schedule.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], dict[int, Busy]] = {}  # by index and text, then by rank

    def hear(self, rank: int, busy: Busy) -> None:
        """Record that ``rank`` has been in the step ``busy`` for long, or that the step has ended on this rank.

        The step may end earlier on some ranks than on others, as in a broadcast.
        """
        key = (busy.index, busy.what)
        said = self._said.get(key, {})
        if not busy.over:
            self._said.setdefault(key, said)[rank] = busy
        elif rank in said:
            said[rank] = busy
            if all(one.over for one in said.values()):
                del self._said[key]

    def awaited(self, sets: Mapping[int, Sequence[int]], present: Collection[int]) -> list[Awaited]:
        """Return a description of each wait, with the ranks that have not reported the work for which the others wait.

        A piece of work is forgotten when no rank in ``present`` is still in it.
        """
        self._said = {
            key: said
            for key, said in self._said.items()
            if any(rank in present and not one.over for rank, one in said.items())
        }
        return [self._one(key, said, sets, present) for key, said in self._said.items()]

    def _one(
        self,
        key: tuple[int, str],
        said: Mapping[int, Busy],
        sets: Mapping[int, Sequence[int]],
        present: Collection[int],
    ) -> Awaited:
        first = next(iter(said.values()))
        members = [rank for rank in sets.get(first.set_id, present) if rank in present]

        def details() -> Details:
            missing = tuple(rank for rank in members if rank not in said)
            late = tuple(Late(name, first.set_id, tuple(sorted(said)), missing, 0.0) for name in first.names)
            return Details(missing, late, () if missing else (ALL_ENTERED,))

        if first.has_deadline:
            everyone = Details(tuple(members))
            asked = f"to take part in {first.what}"
            return Awaited(("busy", key), f"in {first.what}", asked, lambda: everyone, only_silent=True)
        waited_s = max(one.waits_s for one in said.values())
        return Awaited(("busy", key), f"in {first.what}", f"to take part in {first.what}", details, waited_s)


def _has_come(one: ReplayStatus, alarm: ReplayStatus) -> bool:
    """Return whether the rank of ``one`` has entered the bucket of ``alarm`` or has gone past it.

    The root of a broadcast, for example, may go past it without waiting.
    """
    return one.place > alarm.place or (one.launched and one.place == alarm.place)


def _place(one: ReplayStatus) -> str:
    """Describe at which other bucket the rank of ``one`` is."""
    if one.launched:
        return f"in {_called(one.names, one.set_id)} (place {one.place})"
    return f"at place {one.place}, without {_called(one.missing, one.set_id)}"


def _called(names: Iterable[str], set_id: int) -> str:
    return describe([name or "(a call without a name)" for name in names], set_id)
