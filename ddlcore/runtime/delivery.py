"""Defines how the results of a bucket that has run reach its tensors: at once, later, or never if the bucket is void."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddlcore.contracts.device import Event
from ddlcore.errors import DdlInternalError
from ddlcore.runtime.outcome import Outcome

Deliver = Callable[[], list[Outcome | None]]


@dataclass(frozen=True)
class Later:
    """A bucket that is queued on a device and may turn out void.

    Call ``deliver`` only when the bucket is known to be valid. There are two ways to know this. First, ``event`` shows
    that the device completed the bucket before this rank froze. Second, ``told`` is True: then the host of every member
    has said that it launched this bucket with real data. In the second case, every earlier bucket of the same process
    set is valid too.
    """

    event: Event
    deliver: Deliver
    told: bool = False


class Staged:
    """A function that delivers the results of a bucket.

    If the bucket turns out void, ``void()`` is called, and this function is not. ``void()`` undoes the changes that
    running the bucket made.
    """

    def __init__(self, deliver: Deliver, void: Callable[[], None]) -> None:
        self._deliver = deliver
        self.void = void

    def __call__(self) -> list[Outcome | None]:
        return self._deliver()


def void() -> list[Outcome | None]:
    """Raise DdlInternalError. This is the deliver function of a void atomic allreduce, and must never be called."""
    raise DdlInternalError("a void bucket was about to be handed over; please report this")


def same(outcomes: list[Outcome | None]) -> list[Outcome | None]:
    """Return ``outcomes``. This is the deliver function of a bucket whose results are already in the target memory."""
    return outcomes
