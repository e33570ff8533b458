"""Keeps the buckets that are in flight on devices and may turn out void. Also makes the devices release unused memory.

A bucket is usually kept until the hosts have told each other that all of them launched the bucket with real data. In
two cases, the bucket is kept until the device has completed it: a user thread already waits for the bucket, or the
hosts cannot tell each other.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ddlcore.runtime.completion import Completion
from ddlcore.runtime.delivery import Deliver, Later
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch

LOOK_S = 0.001  # the pause between two checks while no thread waits
SLICE_S = 0.0005  # the length of one wait, after which a bucket that has become ready is launched first


class Untidy(Protocol):
    """The devices of a rank, seen only as objects that can release memory which is no longer used."""

    @property
    def untidy(self) -> bool:
        """Return whether there is memory that ``tidy`` must release later."""

    def tidy(self) -> None:
        """Release the memory that devices no longer use. If more memory must be released later, ``untidy`` stays True.

        Raises an error if the work on a device was aborted: then an event does not prove that the memory is unused.
        """


class DevicesInFlight:
    """The buckets of one rank that are in flight on devices. Only the engine calls methods that change this object."""

    def __init__(self, completion: Completion, meter: Meter, devices: Untidy) -> None:
        self._devices = devices
        self._completion = completion
        self._meter = meter
        self._buckets: deque[tuple[Launch[Entry], Later]] = deque()  # in the order in which they were queued

    def add(self, launch: Launch[Entry], later: Later) -> None:
        """Add the bucket ``launch``, which is queued on a device. ``later`` can deliver the bucket's results."""
        self._buckets.append((launch, later))

    def look_s(self) -> float | None:
        """Return for how many seconds the engine may sleep before it calls ``is_due`` again.

        Return None if the engine may sleep without a limit.
        """
        return LOOK_S if self._buckets or self._devices.untidy else None

    def is_due(self, slept: bool, stopped: bool) -> bool:
        """Return whether ``landed`` must be called now.

        ``slept`` says that the engine has slept for the whole time that ``look_s`` returned. ``stopped`` says that the
        engine is going to end.
        """
        if not self._buckets:
            return slept and self._devices.untidy
        return slept or stopped or self._completion.wanted or _is_done(self._buckets[0][1])

    def landed(self) -> list[tuple[Launch[Entry], Deliver]]:
        """Remove the buckets that devices have completed, and return them in order. Also make devices release memory.

        If a thread waits for an operation on a device and no bucket is complete, first wait up to SLICE_S seconds for
        the last bucket. Raises DeviceError if a device has failed and no bucket was completed before the failure. Also
        raises the error of ``Untidy.tidy``.
        """
        done: list[tuple[Launch[Entry], Deliver]] = []
        if self._buckets and self._completion.wanted and not _is_done(self._buckets[0][1]):
            begun_ns = now_ns()
            self._buckets[-1][1].event.wait(SLICE_S)
            self._meter.device_ns += now_ns() - begun_ns
        self._devices.tidy()
        try:
            while self._buckets and self._buckets[0][1].event.done():
                launch, later = self._buckets.popleft()
                done.append((launch, later.deliver))
        except Exception:
            if not done:
                raise  # else the next call raises it: completed buckets must not be lost
        return done

    def through(self, launch: Launch[Entry]) -> list[tuple[Launch[Entry], Deliver]]:
        """Remove the buckets of ``launch``'s process set up to and including ``launch``, and return them in order.

        Buckets that the device has not yet completed are removed and returned too.
        """
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
        """Remove all buckets and return them, including those that the device has not completed."""
        buckets, self._buckets = self._buckets, deque()
        return [(launch, later.deliver) for launch, later in buckets]

    def __bool__(self) -> bool:
        return bool(self._buckets)


def _is_done(later: Later) -> bool:
    """Return whether the device has completed the bucket, or has failed before that."""
    try:
        return later.event.done()
    except Exception:  # ``landed`` raises it
        return True
