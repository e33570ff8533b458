"""Notices when this rank has been in one operation for long, and makes the report about it for the coordinator.

Only the rank itself can see how long it has been in an operation. When a reported operation has ended, a second report
says so. This module uses no thread and no lock, and does not read a clock: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ddlcore.messages.observing import Busy, ReplayStatus
from ddlcore.runtime.clock import WatchedTime
from ddlcore.runtime.patience import Patience

IDLE_S = 1.0
LEAST_S = 0.05


class Alarm:
    """Decides when this rank has been in one operation for so long that it must report this to the coordinator.

    ``patience`` has two time limits, ``warning_s`` and ``shutdown_s``. The report is made a little before the earlier
    one. So the coordinator can ask the other ranks and get their answers before that limit. If both are 0, there are no
    reports.
    """

    def __init__(self, patience: Patience) -> None:
        least_s = min((limit_s for limit_s in (patience.warning_s, patience.shutdown_s) if limit_s > 0), default=0.0)
        self.interval_s = min(IDLE_S, max(LEAST_S, least_s / 8)) if least_s else IDLE_S  # how often to check
        self._after_s = max(least_s - patience.answer_s, least_s / 2)
        self._looks = least_s > 0
        self._look_s = 0.0  # when to check again: the control thread calls more often than needed
        self._time = WatchedTime()
        self._at: tuple[int, int] | tuple[int, str] | None = None  # the rank's place; none is reached twice
        self._since_s = 0.0
        self._given: ReplayStatus | Busy | None = None

    def look(self, doing: Callable[[], ReplayStatus | Busy | None], now_s: float) -> list[ReplayStatus | Busy]:
        """Return the reports that must be sent at the time ``now_s``.

        A report says that an operation has lasted for long, or that a reported operation has ended. ``doing`` returns
        the operation that the rank is in now, or None. Each report is returned only once.
        """
        if not self._looks or now_s < self._look_s:
            return []
        self._look_s = now_s + self.interval_s / 2
        at_s = self._time.at(now_s)
        one = doing()
        at = _place(one)
        said: list[ReplayStatus | Busy] = []
        if at != self._at:
            self._at, self._since_s = at, at_s
            if self._given is not None:
                said.append(_over(self._given))
                self._given = None
        waits_s = at_s - self._since_s
        if one is not None and self._given is None and waits_s >= self._after_s:
            self._given = one
            said.append(_waiting(one, waits_s))
        return said

    def since(self, replay_status: ReplayStatus | None) -> ReplayStatus | None:
        """Return a copy of ``replay_status`` that also says how long the rank has been at its place in the schedule.

        Return ``replay_status`` itself if it is None, or if that length of time is not known because ``look`` has not
        yet seen the rank at this place.
        """
        if replay_status is None or _place(replay_status) != self._at:
            return replay_status
        return msgspec.structs.replace(replay_status, waits_s=self._time.seconds - self._since_s)


def _place(one: ReplayStatus | Busy | None) -> tuple[int, int] | tuple[int, str] | None:
    if one is None:
        return None
    return (one.index, one.what) if isinstance(one, Busy) else (one.epoch, one.place)


def _waiting(one: ReplayStatus | Busy, waits_s: float) -> ReplayStatus | Busy:
    if isinstance(one, Busy):
        return msgspec.structs.replace(one, waits_s=waits_s)
    return msgspec.structs.replace(one, alarm=True, waits_s=waits_s)


def _over(one: ReplayStatus | Busy) -> ReplayStatus | Busy:
    return (
        msgspec.structs.replace(one, over=True) if isinstance(one, Busy) else msgspec.structs.replace(one, moved=True)
    )
