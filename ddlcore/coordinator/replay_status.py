"""Describes stalls that only the ranks can see: which ranks wait in which bucket, and which ranks have not reached it.

This module is part of the coordinator's state machine, without I/O and without a clock. In replay, the coordinator does
not know which tensors are ready. For a negotiated bucket, the coordinator does not know which ranks have run it. So the
ranks report such stalls: a rank that has been at one bucket for long sends a message, and the coordinator asks the
other members for their replay status.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.stall_table import Late, on_ranks
from ddlcore.messages.observing import Busy, ReplayStatus
from ddlcore.messages.ranks import WorldRank
from ddlcore.runtime.checks import describe

ALL_ENTERED = "every rank has entered it: the transport or the network holds it up"


class ReplayStatuses:
    """The last alarm of any rank, and the replay status that each rank has reported since that alarm.

    A rank reports an alarm when it has been at one bucket of the schedule for long.
    """

    def __init__(self) -> None:
        self._alarm: ReplayStatus | None = None
        self._told: dict[WorldRank, ReplayStatus] = {}
        self._awaited: set[WorldRank] = set()

    def hear(self, rank: WorldRank, replay_status: ReplayStatus, members: Iterable[WorldRank]) -> list[WorldRank]:
        """Handle the replay status of ``rank``, and return the ranks that must be asked for their replay status.

        ``members`` are the ranks of the bucket's process set.
        """
        known = self._alarm
        if replay_status.moved:
            if known is not None and (known.epoch, known.place) == (replay_status.epoch, replay_status.place):
                self._alarm = None
            return []
        ask: list[WorldRank] = []
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

    def awaited(self, epoch: int, present: Collection[WorldRank]) -> list[Awaited[WorldRank]]:
        """Return the wait for the bucket of the last alarm, in a list of one item.

        The list is empty if there is no alarm: the ranks have left replay, or the rank of the alarm has gone on.
        ``epoch`` is the present epoch. ``present`` are the ranks that have not left the world.
        """
        alarm = self._alarm
        if alarm is None or alarm.epoch != epoch:  # replay was left meanwhile, so no rank waits for this bucket
            return []
        where = f"in replay (epoch {alarm.epoch}, place {alarm.place})"
        asked = f"where it is in replay (Where of epoch {alarm.epoch})"
        key = ("place", alarm.epoch, alarm.place)
        return [Awaited(key, where, asked, lambda: self._details(alarm, present), alarm.waits_s)]

    def _details(self, alarm: ReplayStatus, present: Collection[WorldRank]) -> Details[WorldRank]:
        told = self._told
        there = {rank for rank, one in told.items() if _has_come(one, alarm)}
        absent = (told.keys() - there) | self._awaited
        absent -= absent - set(present)
        return Details(tuple(sorted(absent)), tuple(self._late(alarm, there)), tuple(self._other_places(alarm, there)))

    def _late(self, alarm: ReplayStatus, there: Collection[WorldRank]) -> list[Late]:
        """Return the tensors of the bucket in ``alarm`` that at least one rank does not have ready.

        If every rank has all tensors ready, return all tensors of the bucket. ``there`` are the ranks that have
        entered the bucket.
        """
        found = []
        everyone = sorted(self._told.keys() | self._awaited)
        for name in alarm.names:
            ready = tuple(rank for rank in everyone if rank in there or self._has(rank, name, alarm))
            missing = tuple(rank for rank in everyone if rank not in ready)
            found.append(Late(name, alarm.set_id, ready, missing, 0.0))
        return [one for one in found if one.missing] or found

    def _has(self, rank: WorldRank, name: str, alarm: ReplayStatus) -> bool:
        one = self._told.get(rank)
        return one is not None and one.place == alarm.place and name not in one.missing

    def _other_places(self, alarm: ReplayStatus, there: Collection[WorldRank]) -> list[str]:
        """Return lines about ranks that are at another bucket than the bucket of ``alarm``.

        A report shows these lines below its table of tensors, which has no column for this. ``there`` are the ranks
        that have entered the bucket of ``alarm``. Ranks that are at the same other bucket share a line. If all ranks
        have entered the bucket of ``alarm``, return one line that says so.
        """
        said: dict[str, list[WorldRank]] = {}
        for rank, one in sorted(self._told.items()):
            if rank not in there and one.place != alarm.place:
                said.setdefault(_place(one), []).append(rank)
        notes = [f"{on_ranks(ranks)}: {what}" for what, ranks in said.items()]
        if not notes and not self._awaited and there == self._told.keys():
            notes = [ALL_ENTERED]
        return notes


class Busies:
    """The pieces of work with which the engines of ranks have been busy for long, as these ranks have reported.

    A piece of work is a negotiated bucket, or an action of the engine that does not belong to a schedule.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], dict[WorldRank, Busy]] = {}  # by index and text, then by rank

    def hear(self, rank: WorldRank, busy: Busy) -> None:
        """Record that ``rank`` has been busy with the work ``busy`` for long, or that this work has ended on ``rank``.

        The same work may end earlier on some ranks than on others, for example a broadcast.
        """
        key = (busy.index, busy.what)
        said = self._said.get(key, {})
        if not busy.over:
            self._said.setdefault(key, said)[rank] = busy
        elif rank in said:
            said[rank] = busy
            if all(one.over for one in said.values()):
                del self._said[key]

    def awaited(
        self, sets: Mapping[int, Sequence[WorldRank]], present: Collection[WorldRank]
    ) -> list[Awaited[WorldRank]]:
        """Return a description of the wait for each reported work. It names the ranks that have not reported the work.

        ``sets`` contains the ranks of each process set. ``present`` are the ranks that have not left the world. The
        work is forgotten when no rank of ``present`` is still busy with it.
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
        said: Mapping[WorldRank, Busy],
        sets: Mapping[int, Sequence[WorldRank]],
        present: Collection[WorldRank],
    ) -> Awaited[WorldRank]:
        first = next(iter(said.values()))
        members = [rank for rank in sets.get(first.set_id, present) if rank in present]

        def details() -> Details[WorldRank]:
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
    """Return whether the rank with the status ``one`` has entered the bucket of ``alarm``, or is at a later bucket.

    A rank need not wait for the others in each bucket: for example, the root of a broadcast goes on before them.
    """
    return one.place > alarm.place or (one.launched and one.place == alarm.place)


def _place(one: ReplayStatus) -> str:
    """Return a text that names the bucket at which the rank with the status ``one`` is."""
    if one.launched:
        return f"in {_called(one.names, one.set_id)} (place {one.place})"
    return f"at place {one.place}, without {_called(one.missing, one.set_id)}"


def _called(names: Iterable[str], set_id: int) -> str:
    return describe([name or "(a call without a name)" for name in names], set_id)
