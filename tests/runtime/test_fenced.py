"""What who waits for a device's event is told where the job ends meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddlcore.contracts.device import Event
from ddlcore.errors import DeviceError, PeerLost
from ddlcore.runtime.fenced import FencedHandle
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.outcome import Outcome
from tests.runtime.waiting import waiter_of


class Late(Event):
    """An event that an abort lets come, as it does on a device."""

    handle = 7

    def __init__(self) -> None:
        self.come = False

    def done(self) -> bool:
        return self.come

    def wait(self, timeout_s: float) -> bool:
        return self.come


def lost(during: str) -> PeerLost:
    return PeerLost((1,), "killed", during)


class Wait:
    """A handle whose bucket is queued on a device; the adapter waits for ``event``, and the job may end meanwhile."""

    def __init__(self) -> None:
        self.job_failure = JobFailure()
        self.event = Late()
        self.failure: Exception | None = None
        self.ends = False  # whether the job does
        self.followed: list[int] = []
        self.handle = FencedHandle(
            waiter_of(failure=self.job_failure), 1, lambda outcomes: "result", self.after, ["tensor"]
        )
        self.handle.complete(0, Outcome(event=self.event), 0)

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        """An adapter's that can make no stream wait, and so blocks."""
        self.followed.append(event)
        if self.ends:
            self.job_failure.give(lost)  # which comes before the abort
        self.event.come = True
        if self.failure is not None:
            raise self.failure


def test_a_result_is_followed() -> None:
    """The adapter waits, and the result comes."""
    wait = Wait()
    assert wait.handle.wait() == "result"
    assert wait.followed == [7]


def test_a_job_that_ends_while_somebody_waits() -> None:
    """What the abort has let come is garbage, and is not handed over as a result."""
    wait = Wait()
    wait.ends = True
    with pytest.raises(PeerLost, match="rank 1 lost"):
        wait.handle.wait()
    assert wait.followed == [7]


def test_a_job_that_has_ended() -> None:
    """Nobody waits for what will not come; what had come before is a result all the same."""
    wait = Wait()
    wait.job_failure.give(lost)
    with pytest.raises(PeerLost, match="rank 1 lost"):
        wait.handle.wait()
    assert wait.followed == []
    wait.event.come = True
    assert wait.handle.wait() == "result"


def test_a_device_that_fails_because_a_peer_died() -> None:
    """The better explanation, where there is one."""
    wait = Wait()
    wait.failure, wait.ends = DeviceError("a result does not come"), True
    with pytest.raises(PeerLost, match="rank 1 lost"):
        wait.handle.wait()
