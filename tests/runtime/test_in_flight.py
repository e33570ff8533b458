"""What a device has under way when it fails: no bucket is lost, so that every handle of them ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ddl_conform.pretend import KIND, PretendRuntime

from ddlcore.contracts.device import Event
from ddlcore.errors import DeviceError
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.delivery import Later
from ddlcore.runtime.device.devices import Devices
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.meter import Meter
from ddlcore.types import Device
from tests.runtime.waiting import NoDevices


class Asked(Event):
    """Answers ``done`` with what ``answer`` says or raises."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return self._answer()

    def wait(self, timeout_s: float) -> bool:
        return self._answer()


def fail() -> bool:
    raise DeviceError("the device is gone")


def test_what_was_done_before_a_failure_is_handed_over() -> None:
    """The bucket in front is done, then the device fails: one comes back, and the other when it is asked again."""
    in_flight = DevicesInFlight(Completion(), Meter(), NoDevices())
    first: Any = object()
    second: Any = object()
    in_flight.add(first, Later(Asked(lambda: True), list))
    in_flight.add(second, Later(Asked(fail), list))
    assert [launch for launch, _ in in_flight.landed()] == [first]
    with pytest.raises(DeviceError, match="gone"):
        in_flight.landed()
    assert [launch for launch, _ in in_flight.all()] == [second]


def test_a_device_may_be_opened_while_the_engine_tidies() -> None:
    """A user's thread comes to its second device just as the engine looks at what the first has done with."""

    def make(device: Device) -> PretendRuntime:
        runtime = PretendRuntime()
        runtime.open(device)
        return runtime

    devices = Devices(make, lambda kind, number: Device(kind, number), lambda: False, Meter())
    devices.label(Device(KIND, 0))
    opened = False

    def open_another() -> bool:
        nonlocal opened
        if opened:
            devices.label(Device(KIND, 1))
        opened = True
        return False

    try:
        devices.stream(KIND).keep(Asked(open_another), ())
        devices.tidy()
        assert devices.untidy
        assert len(devices.streams) == 2
    finally:
        devices.close(1.0)
