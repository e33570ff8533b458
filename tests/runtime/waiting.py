"""A waiter whose threads nobody helps, and devices that do nothing, for tests without an engine or a device."""

from __future__ import annotations

from ddlcore.runtime.completion import Completion
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.waiter import Helper, StallCheck, Waited, Waiter

__all__ = ["Alone", "NoDevices", "waiter_of"]


class Alone:
    """Neither helps a thread that waits, nor watches it."""

    def progress(self, operation: Waited) -> None: ...

    def wake_for_device(self) -> None: ...

    def check_stall(self, since_s: float) -> float:
        return 0.1


class NoDevices:
    """The devices of a rank that uses none."""

    untidy = False

    def tidy(self) -> None: ...


def waiter_of(
    completion: Completion | None = None,
    helper: Helper | None = None,
    stall_watch: StallCheck | None = None,
    failure: JobFailure | None = None,
) -> Waiter:
    """Return a waiter whose parts do nothing unless they are given."""
    return Waiter(completion or Completion(), helper or Alone(), stall_watch or Alone(), failure or JobFailure())
