"""Keeps what is in flight on devices and needs the host later: buckets that may turn out void, and memory in use.

A bucket stays here until the hosts have told each other that all of them launched it with real data. If a user thread
waits for the bucket before that, or if the hosts cannot tell each other, it stays until the device has completed it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ddlcore.runtime.completion import Completion
from ddlcore.runtime.executor import Deliver, Later
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch

LOOK_S = 0.001  # the pause between two checks while no thread waits
SLICE_S = 0.0005  # the length of one wait, after which a bucket that has become ready is launched first


class Untidy(Protocol):
    """The devices of a rank, as an object that knows whether they keep memory which must be released later."""

    @property
    def untidy(self) -> bool:
        """Return whether memory is kept that ``tidy`` must release."""

    def tidy(self) -> None:
        """Release memory that devices no longer use, and store in ``untidy`` whether they still keep more.

        Raises if the work on a device was aborted, because an event after aborted work proves nothing.
        """


class NoDevices:
    """The devices of a rank that uses none."""

    untidy = False

    def tidy(self) -> None: ...


class DevicesInFlight:
    """The buckets of one rank that are in flight on devices. Only the engine changes them."""

    def __init__(self, completion: Completion, meter: Meter, devices: Untidy) -> None:
        self._devices = devices
        self._completion = completion
        self._meter = meter
        self._buckets: deque[tuple[Launch[Entry], Later]] = deque()  # in the order in which they were queued

    def add(self, launch: Launch[Entry], later: Later) -> None:
        """Add ``launch``, a bucket that is queued on a device and may turn out void; ``later`` delivers its results."""
        self._buckets.append((launch, later))

    def look_s(self) -> float | None:
        """Return for how many seconds the engine may sleep before it calls ``is_due`` again; None: without limit."""
        return LOOK_S if self._buckets or self._devices.untidy else None

    def is_due(self, slept: bool, stopped: bool) -> bool:
        """Return whether ``landed`` must be called now.

        ``slept`` says that the engine has slept for the whole of ``look_s``, ``stopped`` that it is going to end.
        """
        if not self._buckets:
            return slept and self._devices.untidy
        return slept or stopped or self._completion.wanted or _is_done(self._buckets[0][1])

    def landed(self) -> list[tuple[Launch[Entry], Deliver]]:
        """Remove the buckets that devices have completed, and return them in order. Release memory as well.

        If a thread waits for something on a device and nothing is complete, first wait a moment for the last bucket.
        Raises DeviceError if a device has failed and no bucket was completed before that. Raises what ``Untidy.tidy``
        raises.
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
        """Remove the buckets of ``launch``'s process set up to and with ``launch``, and return them in order.

        It does not matter whether the device has completed them.
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
        """Remove and return all buckets, whether the device has completed them or not."""
        buckets, self._buckets = self._buckets, deque()
        return [(launch, later.deliver) for launch, later in buckets]

    def __bool__(self) -> bool:
        return bool(self._buckets)


def _is_done(later: Later) -> bool:
    """Return whether the device has reached the bucket's event, or has failed before it."""
    try:
        return later.event.done()
    except Exception:  # ``landed`` raises it
        return True
