"""Records which ranks have asked to leave replay, and at which bucket these ranks were.

These facts are used to describe a freeze that does not end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.coordinator.stall_table import Late
from ddlcore.messages.observing import ReplayStatus
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import Leave
from ddlcore.messages.to_rank import Planned


class Freezes:
    """The reports of the ranks that asked to leave replay in the present epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._left: dict[WorldRank, ReplayStatus] = {}

    def leave(self, rank: WorldRank, message: Leave, epoch: int) -> None:
        """Record that ``rank`` asks to leave replay in ``epoch``, and keep the replay status from ``message``."""
        if epoch != self._epoch:
            self._epoch, self._left = epoch, {}
        if message.replay_status is not None and message.replay_status.epoch == epoch:
            self._left.setdefault(rank, message.replay_status)

    def waited_s(self, epoch: int) -> float:
        """Return the time, in seconds, for which a rank had waited at one bucket when it asked to leave replay.

        If several ranks have asked in ``epoch``, return the longest time. If no rank has asked, return 0.
        """
        return max((one.waits_s for one in self._of(epoch).values()), default=0.0)

    def tensors(
        self,
        epoch: int,
        buckets: Sequence[Planned],
        frozen: Mapping[WorldRank, Mapping[int, int]],
        sets: Mapping[int, Sequence[WorldRank]],
    ) -> list[Late]:
        """Return the tensors of ``buckets`` that are ready on some ranks and missing on other ranks.

        ``buckets`` are the buckets of the schedule that is replayed. ``frozen`` contains, for each rank that has
        answered Freeze, the place of the last launched bucket of each process set. A rank that has not answered counts
        as missing, because it is not known which buckets this rank has launched. ``sets`` contains the ranks of each
        process set.
        """
        found: dict[tuple[int, str], Late] = {}
        for set_id, members in sets.items():
            launched = {rank: places.get(set_id, -1) for rank, places in frozen.items() if rank in members}
            place = max(launched.values(), default=-1)
            if place < 0 or buckets[place % len(buckets)].set_id != set_id:
                continue
            ready = tuple(rank for rank in members if launched.get(rank, -1) >= place)
            missing = tuple(rank for rank in members if rank not in ready)
            for name in buckets[place % len(buckets)].names if missing else ():
                found[set_id, name] = Late(name, set_id, ready, missing, 0.0)
        for one in self._of(epoch).values():
            known = {
                rank: replay_status
                for rank, replay_status in self._of(epoch).items()
                if replay_status.place == one.place
            }
            for name in one.names:
                members = sets.get(one.set_id, ())
                ready = tuple(
                    rank
                    for rank in members
                    if (rank in known and name not in known[rank].missing)
                    or frozen.get(rank, {}).get(one.set_id, -1) >= one.place
                )
                missing = tuple(rank for rank in members if rank not in ready)
                if ready and missing:
                    found.setdefault((one.set_id, name), Late(name, one.set_id, ready, missing, 0.0))
        return list(found.values())

    def _of(self, epoch: int) -> dict[WorldRank, ReplayStatus]:
        return self._left if epoch == self._epoch else {}
