"""What a device has under way that the host has yet to see to: buckets that may be void, and memory in use.

Buckets are here until the hosts have told each other that all have launched them with real data. Where a thread of
the user's waits for one before that, or the hosts cannot, the device tells, when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ddlcore.runtime.executor import Deliver, Later
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch

__all__ = ["DevicesInFlight"]

LOOK_S = 0.001  # between two looks while nobody waits
SLICE_S = 0.0005  # of a wait: a bucket that becomes ready meanwhile is launched first


class DevicesInFlight:
    """Of one engine. ``tidy`` lets go of memory that devices have done with, and says whether there is more.

    It raises where what is under way was broken off: an event behind that tells nothing.
    """

    def __init__(self, completion: Completion, meter: Meter) -> None:
        self.tidy: Callable[[], bool] = lambda: False
        self._completion = completion
        self._meter = meter
        self._buckets: deque[tuple[Launch[Entry], Later]] = deque()  # in the order of their queue
        self._untidy = False

    def add(self, launch: Launch[Entry], later: Later) -> None:
        """It is queued, and may turn out void."""
        self._buckets.append((launch, later))

    def used(self) -> None:
        """A device has been given something to do, whose memory is to be let go of some day."""
        self._untidy = True

    def look_s(self) -> float | None:
        """How long the engine may sleep before it is to look here; None: as long as it likes."""
        return LOOK_S if self._buckets or self._untidy else None

    def is_due(self, slept: bool, stopped: bool) -> bool:
        """Whether ``landed`` is to be called now: somebody waits for it, or there is something to see to."""
        if not self._buckets:
            return slept and self._untidy
        return slept or stopped or self._completion.wanted or _is_done(self._buckets[0][1])

    def landed(self) -> list[tuple[Launch[Entry], Deliver]]:
        """What is done by now, in order; if somebody waits for that, after a moment's wait for the last of it.

        Raises DeviceError where a device has failed, and nothing was done before that; what ``tidy`` raises.
        """
        done: list[tuple[Launch[Entry], Deliver]] = []
        if self._buckets and self._completion.wanted and not _is_done(self._buckets[0][1]):
            begun_ns = now_ns()
            self._buckets[-1][1].event.wait(SLICE_S)
            self._meter.device_ns += now_ns() - begun_ns
        self._untidy = self.tidy()
        try:
            while self._buckets and self._buckets[0][1].event.done():
                launch, later = self._buckets.popleft()
                done.append((launch, later.deliver))
        except Exception:
            if not done:
                raise  # else next time: what is done must not be lost
        return done

    def through(self, launch: Launch[Entry]) -> list[tuple[Launch[Entry], Deliver]]:
        """What its set has launched up to ``launch``, in order: done or not, it is no longer here."""
        valid: list[tuple[Launch[Entry], Deliver]] = []
        others: deque[tuple[Launch[Entry], Later]] = deque()
        for one, later in self._buckets:
            if one.planned.set_id == launch.planned.set_id and one.place <= launch.place:
                valid.append((one, later.deliver))
            else:
                others.append((one, later))
        self._buckets = others
        return valid

    def all(self) -> list[tuple[Launch[Entry], Deliver]]:
        """Everything, done or not; it is no longer here."""
        buckets, self._buckets = self._buckets, deque()
        return [(launch, later.deliver) for launch, later in buckets]

    def __bool__(self) -> bool:
        return bool(self._buckets)


def _is_done(later: Later) -> bool:
    """Whether the device has come to it, or failed before."""
    try:
        return later.event.done()
    except Exception:  # ``landed`` raises it
        return True
