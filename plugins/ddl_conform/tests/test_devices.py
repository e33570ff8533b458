"""The pretend device passes the suite of device runtimes, and one that forgets a fence does not."""

from __future__ import annotations

import pytest
from ddl_conform.pretend import KIND, PretendQueue, PretendRuntime

from ddlcore.testing import DeviceSuite
from ddlcore.types import Device


class TestPretend(DeviceSuite):
    runtime = PretendRuntime
    device = Device(KIND, 1)


class Hasty(PretendRuntime):
    """Its queues take an event for done."""

    def queue(self) -> PretendQueue:
        queue = super().queue()
        queue.wait_for = lambda event: None  # type: ignore[method-assign]  # that is the mistake
        return queue


def test_a_queue_that_waits_for_nobody_fails() -> None:
    """Chance lets it pass now and then, but not twenty times."""

    class Suite(DeviceSuite):
        runtime = Hasty
        device = Device(KIND, 0)

    def many() -> None:
        for _ in range(20):
            Suite().test_queues_wait_for_one_another()

    with pytest.raises(AssertionError):
        many()


def test_where_there_is_no_device_its_tests_are_skipped() -> None:
    """With the reason."""

    class Suite(DeviceSuite):
        runtime = PretendRuntime
        device = Device(KIND, 100)

    with pytest.raises(pytest.skip.Exception, match="there is no device pretend:100 here"):
        Suite().test_memory_is_aligned()
